"""Learned switches: what one step does, its pace and its schedule, against slow versions."""

import pytest
import torch

from freemoe.domain_experts.purify import learned
from freemoe.domain_experts.purify.gradients import noise_weights
from freemoe.domain_experts.purify.learned import TrustRegion, WeightSwitches, switch_all, training_schedule
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.domain_experts.purify.test_greedy import LAYOUTS, batches
from tests.domain_experts.slow_learning import masked_gradients
from tests.masks import indices_of
from tests.tiny import model_and_weights, tiny_model


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_is_gathered_equals_autograd_through_an_explicit_mask(case):
    model, weights = model_and_weights(case)
    rows = batches(0)
    mask = noise_weights(model, weights, batches(1), 200, spread=1e9)[0]
    off = indices_of(mask)
    expected = masked_gradients(model, weights, off, rows)
    switches = {w.name: WeightSwitches.all_on(w) for w in weights}
    switch_all(list(switches.values()), [mask.get(name, own.off) for name, own in switches.items()])
    with switched_off(weights, mask):
        learned._accumulate_gradients(model, switches, rows, False)
    some, slope = 0, 0.0
    for weight, slow in zip(weights, expected, strict=True):
        mean = switches[weight.name].mean.to_dense().flatten()
        torch.testing.assert_close(mean, 0.1 * slow, rtol=1e-3, atol=1e-6, msg=weight.name)
        gone = off.get(weight.name, torch.empty(0, dtype=torch.long))
        some += int((slow[gone] != 0).sum())
        own = weight.canonical_view().reshape(-1)
        slope += float((slow[gone] * -own[gone]).sum())
    # Weights that are off have gradients of their own: that is how they come back.
    assert some > 10
    assert float(sum(s.slope for s in switches.values())) == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_going_back_is_to_the_best_evidence():
    (weight, *_) = find_weights(tiny_model("llama"))
    switch = WeightSwitches.all_on(weight)
    generator = torch.Generator().manual_seed(0)
    switch.add_gradient(torch.randn(weight.shape, generator=generator))
    switch.update_evidence(1.0)
    best = switch.evidence.to_dense().clone()
    switch.save_best()
    for _ in range(2):  # what was kept stays as it was
        switch.add_gradient(torch.randn(weight.shape, generator=generator))
        switch.update_evidence(1.0)
        assert not torch.equal(switch.evidence.to_dense(), best)
        switch.restore_best()
        assert torch.equal(switch.evidence.to_dense(), best)
        assert not switch.mean.to_dense().any()


def test_the_pace_grows_while_steps_end_downhill_and_halves_when_the_loss_rises():
    pace = TrustRegion()
    for _ in range(3):
        pace.update_slope(-1.0)
    assert pace.value == pytest.approx(0.2 * 1.2**3)
    # One step that ended uphill a little does not outweigh the trend; a large one does, for good.
    pace.update_slope(0.5)
    assert pace.value == pytest.approx(0.2 * 1.2**4)
    pace.update_slope(5.0)
    pace.update_slope(-100.0)
    assert pace.value == pytest.approx(0.2 * 1.2**4)
    pace.shrink_step()
    assert pace.value == pytest.approx(0.1 * 1.2**4)
    for stop_growth, expected in ((TrustRegion.freeze_growth, 0.2), (TrustRegion.shrink_step, 0.1)):
        pace = TrustRegion()
        stop_growth(pace)
        pace.update_slope(-1.0)
        assert pace.value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "step_tokens", "steps", "expected"),
    [
        (800_000, 2048, None, (600, 2048)),
        (100_000, 2048, None, (244, 2048)),
        (8_000, 2048, None, (40, 1000)),
        (100_000, 50_000, None, (40, 12_500)),
        (100, 2048, None, (42, 12)),
        (10, 1, None, (50, 1)),
        (3, 2048, None, (24, 1)),
        (100_000, 2048, 7, (7, 2048)),
        (100, 2048, 7, (7, 12)),
    ],
)
def test_a_schedule_follows_from_the_documents(tokens, step_tokens, steps, expected):
    assert training_schedule(tokens, step_tokens, steps) == expected
