"""The mean of what is trained: against the sum of its weights, put on and taken off, kept and gone on with."""

import pytest
import torch
from torch import nn

from freemoe.training.mean import ParameterMean


def walk(steps, seed=0):
    return torch.randn(steps, 5, generator=torch.Generator().manual_seed(seed)).cumsum(0)


def mean_of(rows, window):
    p = nn.Parameter(torch.zeros(5))
    found = ParameterMean({"p": p}, window)
    for row in rows:
        p.data.copy_(row)
        found.update_mean()
    return found


@pytest.mark.parametrize(("steps", "window"), [(1, 0.2), (7, 0.0), (40, 0.2), (40, 1.0), (300, 0.1)])
def test_the_mean_weighs_steps_as_its_decay_says(steps, window):
    rows = walk(steps).double()
    weights = torch.zeros(steps, dtype=torch.float64)
    for step in range(1, steps + 1):
        share = 1 / max(1.0, window * step)
        weights *= 1 - share
        weights[step - 1] += share
    # Nothing of the zeros that parameters may have begun with is in it.
    assert float(weights.sum()) == pytest.approx(1)
    found = mean_of(rows.float(), window).values["p"]
    torch.testing.assert_close(found.double(), weights @ rows, rtol=1e-5, atol=1e-5)


def test_parameters_are_put_back_to_the_bit_also_after_an_error():
    found = mean_of(walk(9), 0.5)
    p = found.parameters["p"]
    before = p.detach().clone()
    with found.use_mean():
        assert torch.equal(p, found.values["p"])
        assert not torch.equal(p, before)
    assert torch.equal(p, before)
    with pytest.raises(ZeroDivisionError), found.use_mean():
        torch.zeros(1).item() / 0
    assert torch.equal(p, before)


def test_going_on_is_never_having_stopped():
    rows = walk(20)
    whole, first = mean_of(rows, 0.3), mean_of(rows[:8], 0.3)
    state = first.to_state()
    second = ParameterMean({"p": nn.Parameter(torch.zeros(5))}, 0.3)
    second.load_state({name: t.clone() for name, t in state.items()})
    for row in rows[8:]:
        second.parameters["p"].data.copy_(row)
        second.update_mean()
    assert torch.equal(second.values["p"], whole.values["p"])
    assert all(torch.equal(t, first.to_state()[name]) for name, t in state.items())


def test_before_the_first_step_nothing_is_put_on():
    found = ParameterMean({"p": nn.Parameter(torch.ones(5))}, 0.3)
    with found.use_mean():
        assert torch.equal(found.parameters["p"], torch.ones(5))
