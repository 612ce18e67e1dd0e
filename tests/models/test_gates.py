"""Experts that are off as a whole are not chosen, however they are switched off."""

from unittest.mock import Mock

import pytest
import torch

from freemoe.domain_experts.structured.masks import units_off
from freemoe.domain_experts.structured.units import find_units
from freemoe.models.gates import left_out
from freemoe.models.switchboard import ExpertCache
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.masks import indices_of, mask_of
from tests.tiny import MIXTURES, logits, tiny_model


def off(units, *numbers):
    return {layer.number: torch.tensor(numbers) for layer in units.layers}


def by_mask(model, units, *numbers):
    with units_off(units, off(units, *numbers)):
        return logits(model)


@pytest.mark.parametrize("case", MIXTURES)
def test_positions_of_whole_experts_act_as_a_mask_on_the_router(case):
    model = tiny_model(case)
    weights, units = find_weights(model), find_units(model, "expert")
    whole, wanted = logits(model), by_mask(model, units, 1)
    with switched_off(weights, units.mask(off(units, 1))):
        torch.testing.assert_close(logits(model), wanted, atol=1e-6, rtol=0)
    assert torch.equal(logits(model), whole)
    board = ExpertCache(weights)
    board.add_expert("one", units.mask(off(units, 1)))
    board.add_expert("two", units.mask(off(units, 0)))
    for name, seen in (("one", wanted), ("two", by_mask(model, units, 0)), ("one", wanted), (None, whole)):
        board.activate_expert(name)
        torch.testing.assert_close(logits(model), seen, atol=1e-6, rtol=0)
    assert torch.equal(logits(model), whole)
    assert not any("forward" in layer.module.__dict__ for layer in units.layers)


def test_what_is_nested_leaves_out_what_either_does():
    model = tiny_model("mixtral")
    weights, units = find_weights(model), find_units(model, "expert")
    wanted = by_mask(model, units, 0, 2)
    outer, inner = (units.mask(off(units, n)) for n in (2, 0))
    with switched_off(weights, outer):
        alone = logits(model)
        with switched_off(weights, inner):
            torch.testing.assert_close(logits(model), wanted, atol=1e-6, rtol=0)
        assert torch.equal(logits(model), alone)


def test_an_expert_with_a_weight_left_is_still_chosen_and_so_are_the_last_ones():
    model = tiny_model("mixtral")
    weights, units = find_weights(model), find_units(model, "expert")
    mask = units.mask(off(units, 1))
    assert len(left_out(weights, mask)) == len(units.layers)
    most = {name: where[1:] for name, where in indices_of(mask).items()}
    assert left_out(weights, mask_of(most, weights)) == []
    one_matrix = dict(list(indices_of(mask).items())[:1])
    assert left_out(weights, mask_of(one_matrix, weights)) == []
    # With fewer experts left than a token is given, the router has no choice.
    everything = mask_of({w.name: torch.arange(w.size) for w in weights if w.is_fused}, weights)
    assert left_out(weights, everything) == []
    with switched_off(weights, everything):
        assert logits(model).isfinite().all()


def test_an_interrupted_switching_leaves_the_base(monkeypatch):
    model = tiny_model("mixtral")
    weights, units = find_weights(model), find_units(model, "expert")
    whole = logits(model)
    board = ExpertCache(weights)
    for name, number in (("one", 1), ("two", 0)):
        board.add_expert(name, units.mask(off(units, number)))
    board.activate_expert("one")
    with monkeypatch.context() as patched:
        patched.setattr("freemoe.models.switchboard.exclude_experts", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            board.activate_expert("two")
    assert board.active_expert is None
    assert torch.equal(logits(model), whole)
