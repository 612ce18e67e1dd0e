"""Whole heads off (ToMoE Tab. 13, Head Pruning): masks, count, file, exported model and training say the same."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from freemoe.core.errors import DataError, RecipeError
from freemoe.models.sublayers import find_sublayers
from freemoe.recipes import recipe_from
from freemoe.tomoe.export import build_converted_model, export_converted_model
from freemoe.tomoe.gates.discretize import structure_of
from freemoe.tomoe.structures.masked import apply_structure
from freemoe.tomoe.structures.structure import (
    active_parameters,
    dense_parameters,
    dense_structure,
    from_tensors,
    require_structure_fits,
    to_tensors,
)
from tests.tiny import tiny_model
from tests.tomoe.gates.test_train import recipe, text, trainer
from tests.tomoe.random_structures import random_structure

IDS = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))


def pruned(model, structure):
    """The structure without the first key and value head of every layer."""
    kept = torch.arange(find_sublayers(model)[0].kv_heads) > 0
    return [replace(layer, heads=kept) for layer in structure]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_exported_model_has_fewer_heads_and_the_masks_logits(family, tmp_path):
    model = tiny_model(family)
    structure = pruned(model, random_structure(model))
    with apply_structure(model, structure):
        wanted = model(IDS).logits
    new = build_converted_model(model, structure)
    torch.testing.assert_close(new(IDS).logits, wanted, atol=1e-4, rtol=1e-4)
    loaded = AutoModelForCausalLM.from_pretrained(export_converted_model(model, structure, tmp_path / "m"))
    torch.testing.assert_close(loaded(IDS).logits, wanted, atol=1e-4, rtol=1e-4)
    # Token by token, through the cache.
    cache, steps = None, []
    for token in IDS.T:
        out = loaded(token[:, None], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), wanted, atol=1e-4, rtol=1e-4)
    layer = find_sublayers(model)[0]
    left = layer.heads - layer.heads // layer.kv_heads
    own = loaded.model.layers[0].self_attn
    assert own.o_proj.weight.shape[0] == left * layer.rotary.head_dim
    assert own.k_proj.weight.shape[0] == (layer.kv_heads - 1) * own.query_width


@torch.no_grad()
def test_a_head_that_is_off_is_one_whose_weights_are_zero():
    model, other = tiny_model("llama"), tiny_model("llama")
    structure = pruned(model, dense_structure(find_sublayers(model)))
    for layer in find_sublayers(other):
        serving = layer.heads // layer.kv_heads
        layer.o.weight[:, : serving * layer.rotary.head_dim] = 0
    with apply_structure(model, structure):
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits)


def test_heads_are_counted_kept_and_checked():
    model = tiny_model("llama")
    sublayers = find_sublayers(model)
    structure = pruned(model, dense_structure(sublayers))
    attention = sum(sum(linear.weight.numel() for linear in (s.q, s.k, s.v, s.o)) for s in sublayers)
    left = active_parameters(structure, sublayers)
    assert dense_parameters(sublayers) - left == attention // sublayers[0].kv_heads
    again = from_tensors(to_tensors(structure))
    assert all(torch.equal(a.heads, b.heads) for a, b in zip(again, structure, strict=True))
    assert from_tensors(to_tensors(dense_structure(sublayers)))[0].heads is None
    with pytest.raises(DataError, match="at least one of them set"):
        require_structure_fits(
            [replace(layer, heads=torch.zeros(sublayers[0].kv_heads, dtype=torch.bool)) for layer in structure],
            sublayers,
        )


def test_training_prunes_heads_and_the_structure_is_its_masks():
    values = {"gates": {"attention": "heads", "noise": False, "export": "threshold"}}
    own = trainer(recipe(profile="paper", **values, train={"steps": 4}))
    sublayers, networks = own.sublayers, own.hypernetwork
    before = [gates.decode_heads.weight.clone() for gates in networks.attention]
    own.train_until(2)
    assert not any(torch.equal(a, g.decode_heads.weight) for a, g in zip(before, networks.attention, strict=True))
    with torch.no_grad():
        # Heads that training would turn off: the threshold of all is crossed, and one is left.
        for gates in networks.attention:
            gates.decode_heads.weight.fill_(-100)
    structure = structure_of(own, text())
    require_structure_fits(structure, sublayers)
    made = own.gating.sample_masks(networks(), None, None)
    for layer, heads in zip(structure, (masks.heads for masks in made), strict=True):
        assert bool(layer.qk.all())
        assert layer.value_width == 8
        assert heads is not None
        assert int(layer.heads.sum()) == max(1, int(heads.sum()))
    share = active_parameters(structure, sublayers) / dense_parameters(sublayers)
    with torch.no_grad(), own.gating.apply_masks(networks, made, None):
        own._run_to_head(text())
        active = float(own._regularisation_terms(made, 0.5)["active"])
    none_left = any(int(masks.heads.sum()) == 0 for masks in made)
    assert share >= active - 1e-6 if none_left else share == pytest.approx(active, abs=1e-6)


def test_an_exact_budget_has_no_rank_of_heads():
    with pytest.raises(RecipeError, match=r"gates\.attention heads needs gates\.budget loss"):
        recipe_from({"command": "convert", "model": "x", "text": ["x"], "gates": {"attention": "heads"}})
