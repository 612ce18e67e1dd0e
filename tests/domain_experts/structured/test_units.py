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
from tests.tiny import DENSE, MIXTURES, logits, tiny_model

# Families whose plain configuration fixes a head's size by the number of heads.
FIXED_HEADS = ["gpt2", "opt", "gpt_neox"]
BIASED = ["phi", "gpt2", "opt", "gpt_neox"]


def model_and_units(case, kind, **changes):
    model = tiny_model(case, **changes)
    return model, find_units(model, kind)


def some_off(units, each):
    """The same units of every layer; of units that are layers, the first."""
    layers = units.layers[:1] if units.kind == "layer" else units.layers
    return {layer.number: torch.tensor(each) for layer in layers}


def assert_computes_the_same(small, model, units, off):
    """A model that units were cut out of, and the whole one with them masked."""
    with units_off(units, off):
        torch.testing.assert_close(logits(small), logits(model), atol=1e-5, rtol=0)


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
    longer = {"num_hidden_layers": 3} if kind == "layer" and case in ("llama", "gemma2") else {}
    model, units = model_and_units(case, kind, **longer)
    off, whole = some_off(units, each), logits(model)
    with units_off(units, off):
        by_mask = logits(model)
    assert torch.equal(logits(model), whole)
    assert (by_mask - whole).abs().max() > 1e-3
    if kind != "expert":  # of which routers would still choose those that are zeros
        with switched_off(find_weights(model), units.mask(off)):
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
    model, units = model_and_units("gemma2", "layer", num_hidden_layers=4)
    off = {0: torch.tensor([0]), 3: torch.tensor([0])}
    small = shrink(model, units, off)
    assert small.config.layer_types == model.config.layer_types[1:3]
    assert_computes_the_same(small, model, units, off)


@pytest.mark.parametrize("kind", ["neuron", "kv_group", "layer"])
def test_a_saved_small_model_is_loaded_as_any_other(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    model, units = model_and_units("llama", kind, num_hidden_layers=3)
    small = shrink(model, units, {1: torch.tensor([0])} if kind == "layer" else some_off(units, [0]))
    small.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(small))


def test_free_masks_need_padding():
    model, units = model_and_units("qwen2", "neuron")
    off = {0: torch.arange(5, 20), 1: torch.tensor([2, 3])}
    with pytest.raises(RecipeError, match=r"33 to 46.*--even"):
        shrink(model, units, off)
    small = shrink(model, units, off, pad=True)
    assert small.config.intermediate_size == 46
    assert_computes_the_same(small, model, units, off)


@pytest.mark.parametrize(("case", "kind"), [("llama", "neuron"), ("llama", "kv_group"), ("mixtral", "expert")])
def test_masks_of_ones_change_no_bit(case, kind):
    model, units = model_and_units(case, kind)
    whole = logits(model)
    with apply_masks(units, all_on_masks(units, "cpu")):
        assert torch.equal(logits(model), whole)
    with pytest.raises(ZeroDivisionError), apply_masks(units, masks_of(units, some_off(units, [1]), "cpu")):
        _ = 1 / 0
    assert torch.equal(logits(model), whole)


def test_positions_of_a_neuron_are_its_rows_and_its_column():
    model, units = model_and_units("phi3", "neuron")
    (up, of_up), (_, of_down) = indices_of(units.mask({1: torch.tensor([4])})).items()
    columns = {w.name: w.num_columns for w in find_weights(model)}
    assert set((of_up // columns[up]).tolist()) == {4, 4 + 48}
    assert set((of_down % 48).tolist()) == {4}
    assert len(of_up) + len(of_down) == units.layers[1].weights_of_one


def units_of(case, kind):
    return model_and_units(case, kind)[1]


def test_counts():
    assert even_count(172, 0.25, 8) == 172 - 128
    assert even_count(172, 0.2, 8) == 172 - 136
    assert even_count(48, 0.25, 1) == 12
    units = units_of("llama", "neuron")
    assert numbers_off(units, 0.25, "free", 8) == [24]
    assert numbers_off(units, 0.25, "even", 8) == [16, 16]


def test_every_layer_keeps_its_least():
    units, scores = units_of("llama", "neuron"), [torch.arange(48.0) - 1000, torch.arange(48.0)]
    off = lowest_units(units, scores, [60])
    assert {k: v.tolist() for k, v in off.items()} == {0: list(range(47)), 1: list(range(13))}
    assert lowest_units(units, scores, [0, 2])[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: even_count(172, 0.7, 64), r"Kept counts.*64, 128"),
        (lambda: even_count(4, 0.6, 1, least=2), "at least 2"),
        (lambda: numbers_off(units_of("llama", "neuron"), 0.0, "free", 8), "above 0 and below 1"),
        (lambda: numbers_off(units_of("llama", "neuron"), 1.0, "free", 8), "above 0 and below 1"),
        (lambda: numbers_off(units_of("llama", "neuron"), -1, "free", 8), "above 0 and below 1"),
        (lambda: numbers_off(units_of("llama", "neuron"), 0.999, "free", 8), "1 to 94"),
        (lambda: numbers_off(units_of("llama", "layer"), 0.9, "even", 8), "1 to 1 can be off"),
        (lambda: units_of("llama", "neuron").require_valid({0: torch.arange(48)}), "at least 1 must stay"),
        (lambda: units_of("llama", "neuron").require_valid({0: torch.tensor([3, 3])}), "must ascend"),
        (lambda: units_of("llama", "neuron").require_valid({7: torch.tensor([3])}), "Layer 7"),
        (lambda: units_of("llama", "layer").require_valid(dict.fromkeys((0, 1), torch.tensor([0]))), "at least 1"),
        (lambda: units_of("llama", "head"), "neuron, kv_group, layer, expert"),
    ],
)
def test_what_no_units_are_like_is_refused(ask, said):
    with pytest.raises(RecipeError, match=said):
        ask()


@pytest.mark.parametrize(
    ("case", "kind", "said"),
    [
        ("llama", "expert", "dense"),
        ("mixtral", "neuron", "--unit expert"),
        ("deepseek_v2", "kv_group", "low-rank"),
        ("gpt2", "layer", "bias"),
    ],
)
def test_models_without_such_units_say_so(case, kind, said):
    with pytest.raises(FamilyError, match=said):
        units_of(case, kind)
