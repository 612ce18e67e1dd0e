"""Units, their masks, and models that they are cut out of."""

import pytest
import torch

from freemoe.core.errors import FamilyError, RecipeError
from freemoe.domain_experts.structured.masks import all_on_masks, apply_masks, masks_of, units_off
from freemoe.domain_experts.structured.shrink import shrink
from freemoe.domain_experts.structured.units import even_count, find_units, lowest_units, numbers_off
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.masks import indices_of
from tests.tiny import DENSE, MIXTURES, tiny_model

# Families whose plain configuration fixes a head's size by the number of heads.
FIXED_HEADS = ["gpt2", "opt", "gpt_neox"]
BIASED = ["phi", "gpt2", "opt", "gpt_neox"]


def logits(model):
    ids = torch.arange(5, 33).reshape(2, 14)
    with torch.no_grad():
        return model(input_ids=ids).logits


def some_off(units, each):
    return {layer.number: torch.tensor(each) for layer in units.layers}


def cases():
    for case in DENSE:
        yield pytest.param(case, "neuron", [0, 3, 17, 18, 40, 41, 42, 47], id=f"{case}-neuron")
        yield pytest.param(case, "kv_group", [1], id=f"{case}-kv_group")
        if case not in BIASED:
            yield pytest.param(case, "layer", [0], id=f"{case}-layer")
    for case in MIXTURES:
        yield pytest.param(case, "expert", [1], id=case)


@pytest.mark.parametrize(("case", "kind", "each"), list(cases()))
def test_masked_is_switched_off_is_cut_out(case, kind, each):
    model = (
        tiny_model(case, num_hidden_layers=3) if case in ("llama", "gemma2") and kind == "layer" else tiny_model(case)
    )
    units = find_units(model, kind)
    off = {units.layers[0].number: torch.tensor(each)} if kind == "layer" else some_off(units, each)
    whole = logits(model)
    weights = find_weights(model)
    with units_off(units, off):
        by_mask = logits(model)
    assert torch.equal(logits(model), whole)
    assert (by_mask - whole).abs().max() > 1e-3
    if kind != "expert":  # of which routers would still choose those that are zeros
        with switched_off(weights, units.mask(off)):
            torch.testing.assert_close(by_mask, logits(model), atol=1e-5, rtol=0)
        assert torch.equal(logits(model), whole)
    if kind == "kv_group" and case in FIXED_HEADS:
        with pytest.raises(FamilyError, match="cannot say what is left"):
            shrink(model, units, off)
        return
    small = shrink(model, units, off)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(logits(small), by_mask, atol=1e-5, rtol=0)


def test_layers_that_differ_keep_their_kind_when_some_are_cut():
    model = tiny_model("gemma2", num_hidden_layers=4)
    units = find_units(model, "layer")
    off = {0: torch.tensor([0]), 3: torch.tensor([0])}
    small = shrink(model, units, off)
    assert small.config.layer_types == model.config.layer_types[1:3]
    with units_off(units, off):
        torch.testing.assert_close(logits(small), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["neuron", "kv_group", "layer"])
def test_a_saved_small_model_is_loaded_as_any_other(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama", num_hidden_layers=3)
    units = find_units(model, kind)
    small = shrink(model, units, {1: torch.tensor([0])} if kind == "layer" else some_off(units, [0]))
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(small))


def test_free_masks_need_padding():
    model = tiny_model("qwen2")
    units = find_units(model, "neuron")
    off = {0: torch.arange(5, 20), 1: torch.tensor([2, 3])}
    with pytest.raises(RecipeError, match=r"33 to 46.*--even"):
        shrink(model, units, off)
    small = shrink(model, units, off, pad=True)
    assert small.config.intermediate_size == 46
    with units_off(units, off):
        torch.testing.assert_close(logits(small), logits(model), atol=1e-5, rtol=0)


def test_masks_of_ones_change_no_bit():
    for case, kind in (("llama", "neuron"), ("llama", "kv_group"), ("mixtral", "expert")):
        model = tiny_model(case)
        units = find_units(model, kind)
        whole = logits(model)
        with apply_masks(units, all_on_masks(units, "cpu")):
            assert torch.equal(logits(model), whole)
        off = masks_of(units, some_off(units, [1]), "cpu")
        with pytest.raises(ZeroDivisionError), apply_masks(units, off):
            _ = 1 / 0
        assert torch.equal(logits(model), whole)


def test_positions_of_a_neuron_are_its_rows_and_its_column():
    model = tiny_model("phi3")
    units = find_units(model, "neuron")
    positions = indices_of(units.mask({1: torch.tensor([4])}))
    weights = {w.name: w for w in find_weights(model)}
    (up, down) = positions
    _, _, columns = weights[up].shape
    assert [sorted(set((positions[up] // columns).tolist()))] == [[4, 4 + 48]]
    assert set((positions[down] % 48).tolist()) == {4}
    assert len(positions[up]) + len(positions[down]) == units.layers[1].weights_of_one


def test_counts():
    assert even_count(172, 0.25, 8) == 172 - 128
    assert even_count(172, 0.2, 8) == 172 - 136
    assert even_count(48, 0.25, 1) == 12
    with pytest.raises(RecipeError, match=r"Kept counts.*64, 128"):
        even_count(172, 0.7, 64)
    with pytest.raises(RecipeError, match="at least 2"):
        even_count(4, 0.6, 1, least=2)
    units = find_units(tiny_model("llama"), "neuron")
    assert numbers_off(units, 0.25, "free", 8) == [24]
    assert numbers_off(units, 0.25, "even", 8) == [16, 16]
    for share in (0.0, 1.0, -1):
        with pytest.raises(RecipeError, match="above 0 and below 1"):
            numbers_off(units, share, "free", 8)
    with pytest.raises(RecipeError, match="1 to 94"):
        numbers_off(units, 0.999, "free", 8)
    with pytest.raises(RecipeError, match="1 to 1 can be off"):
        numbers_off(find_units(tiny_model("llama"), "layer"), 0.9, "even", 8)


def test_every_layer_keeps_its_least():
    units = find_units(tiny_model("llama"), "neuron")
    scores = [torch.arange(48.0) - 1000, torch.arange(48.0)]
    off = lowest_units(units, scores, [60])
    assert {k: v.tolist() for k, v in off.items()} == {0: list(range(47)), 1: list(range(13))}
    assert lowest_units(units, scores, [0, 2])[1].tolist() == [0, 1]
    with pytest.raises(RecipeError, match="at least 1 must stay"):
        units.require_valid({0: torch.arange(48)})
    with pytest.raises(RecipeError, match="must ascend"):
        units.require_valid({0: torch.tensor([3, 3])})
    with pytest.raises(RecipeError, match="Layer 7"):
        units.require_valid({7: torch.tensor([3])})
    layers = find_units(tiny_model("llama"), "layer")
    with pytest.raises(RecipeError, match="at least 1"):
        layers.require_valid({0: torch.tensor([0]), 1: torch.tensor([0])})


def test_models_without_such_units_say_so():
    with pytest.raises(FamilyError, match="dense"):
        find_units(tiny_model("llama"), "expert")
    with pytest.raises(FamilyError, match="--unit expert"):
        find_units(tiny_model("mixtral"), "neuron")
    with pytest.raises(FamilyError, match="low-rank"):
        find_units(tiny_model("deepseek_v2"), "kv_group")
    with pytest.raises(FamilyError, match="bias"):
        find_units(tiny_model("gpt2"), "layer")
    with pytest.raises(RecipeError, match="neuron, kv_group, layer, expert"):
        find_units(tiny_model("llama"), "head")
