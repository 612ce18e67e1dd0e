"""A structure on the dense model: keeping everything changes nothing, and masks are what the slow way computes."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from freemoe.core.errors import DataError, FamilyError
from freemoe.models.sublayers import CONVERTIBLE, find_sublayers
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
from tests.tomoe.random_structures import random_structure

IDS = torch.randint(3, 288, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", CONVERTIBLE)
def test_keeping_everything_changes_no_bit(family):
    model = tiny_model(family)
    sublayers = find_sublayers(model)
    with torch.no_grad():
        before = model(IDS).logits
        with apply_structure(model, dense_structure(sublayers), sublayers):
            inside = model(IDS).logits
        after = model(IDS).logits
    assert torch.equal(before, inside)
    assert torch.equal(before, after)


def test_the_mlp_by_hand():
    model = tiny_model("llama")
    sublayers = find_sublayers(model)
    structure = random_structure(model)
    own = structure[1]
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(2))
    mlp = model.model.layers[1].mlp
    with torch.no_grad(), apply_structure(model, structure, sublayers):
        found = mlp(x)
    for t in range(7):
        token = x[0, t]
        expert = int((own.router_weight @ token + own.router_bias).argmax())
        keep = own.experts[expert]
        a = F.silu(mlp.gate_proj.weight[keep] @ token) * (mlp.up_proj.weight[keep] @ token)
        torch.testing.assert_close(found[0, t], mlp.down_proj.weight[:, keep] @ a, atol=1e-5, rtol=1e-4)


def test_masked_queries_are_pruned_queries():
    """Scores of masked heads are those of the kept dimensions alone, with the original scale, before and after RoPE."""
    model = tiny_model("llama")
    layer = find_sublayers(model)[0]
    bits = torch.tensor([True, False, False, True])
    keep = layer.rotary.expand_bits(bits.float()).bool()
    q, k = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
    cos, sin = model.model.rotary_emb(q[None], torch.arange(5)[None])
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def scores(a, b, c, s):
        a, b = apply_rotary_pos_emb(a[None, None], b[None, None], c, s)
        return (a @ b.transpose(-1, -2))[0, 0] / 8**0.5

    pruned = scores(q[:, keep], k[:, keep], cos[..., keep], sin[..., keep])
    torch.testing.assert_close(scores(q * keep, k * keep, cos, sin), pruned)


@pytest.mark.parametrize("family", CONVERTIBLE)
def test_parameters_are_those_of_the_matrices(family):
    model = tiny_model(family)
    sublayers = find_sublayers(model)
    counted = sum(linear.weight.numel() for s in sublayers for linear in (s.q, s.k, s.v, s.o, s.down, *s.up))
    assert dense_parameters(sublayers) == counted
    assert active_parameters(dense_structure(sublayers), sublayers) == counted


def test_active_parameters_by_brute_force():
    model = tiny_model("phi")
    sublayers = find_sublayers(model)
    structure = random_structure(model)
    total = 0
    for s, own in zip(sublayers, structure, strict=True):
        dims = int(s.rotary.expand_bits(own.qk.float()).sum())
        total += 32 * s.heads * dims + 32 * s.kv_heads * dims
        total += 32 * s.kv_heads * own.value_width + 32 * s.heads * own.value_width
        total += 2 * 32 * max(own.neuron_counts)
    assert active_parameters(structure, sublayers) == total


def test_tensors_and_back():
    model = tiny_model("qwen2")
    structure = random_structure(model)
    structure[0] = dataclasses.replace(structure[0], vo=torch.arange(8) % 2 == 0)
    again = to_tensors(from_tensors(to_tensors(structure)))
    for name, tensor in to_tensors(structure).items():
        assert torch.equal(tensor, again[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk": torch.ones(5, dtype=torch.bool)}, r"qk has shape \(5,\), and \(4,\)"),
        ({"experts": torch.ones(4, 9, dtype=torch.bool)}, r"experts has shape \(4, 9\)"),
        ({"qk": torch.zeros(4, dtype=torch.bool)}, "no query dimension"),
        ({"experts": torch.zeros(4, 48, dtype=torch.bool)}, "expert without neurons"),
        ({"vo": torch.zeros(8, dtype=torch.bool)}, "keeps 0 value dimensions; 1 to 8"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    model = tiny_model("llama")
    sublayers = find_sublayers(model)
    structure = random_structure(model)
    structure[1] = dataclasses.replace(structure[1], **change)
    with pytest.raises(DataError, match=message):
        require_structure_fits(structure, sublayers)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "mixtral", "deepseek_v2"])
def test_families_without_the_parts_are_refused(family):
    with pytest.raises(FamilyError, match=r"cannot be converted.*Convertible: llama"):
        find_sublayers(tiny_model(family))
