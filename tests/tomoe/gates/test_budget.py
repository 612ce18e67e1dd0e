"""Widths from one budget: never above it, as near as one unit allows, and in the order of worth."""

import pytest
import torch

from freemoe.models.sublayers import find_sublayers
from freemoe.tomoe.gates.budget import LayerWidths, choose_widths, make_profile
from freemoe.tomoe.structures.structure import dense_parameters, linear_parameters
from tests.tiny import tiny_model


def profiles(sublayers, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        make_profile(
            torch.randn(s.rotary.num_bits, generator=g),
            s.rotary.bit_sizes,
            torch.randn(s.rotary.head_dim, generator=g),
            torch.randn(3, s.intermediate_size, generator=g),
        )
        for s in sublayers
    ]


def cost(sublayers, own, chosen):
    return sum(
        linear_parameters(s, w.vo, int(p.sizes[: w.qk].sum()), w.mlp)
        for s, p, w in zip(sublayers, own, chosen, strict=True)
    )


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.77, 1.0])
def test_the_budget_is_used_and_never_exceeded(family, share):
    sublayers = find_sublayers(tiny_model(family))
    own = profiles(sublayers)
    chosen = choose_widths(own, sublayers, share)
    used, dense = cost(sublayers, own, chosen), dense_parameters(sublayers)
    dearest = max(2 * s.hidden_size * (s.heads + s.kv_heads) for s in sublayers)
    assert share * dense - dearest <= used <= share * dense + 0.5
    if share == 1:
        assert used == dense


def test_a_threshold_separates_what_is_in():
    sublayers = find_sublayers(tiny_model("llama"))
    own = profiles(sublayers)
    inside, outside = [], []
    for p, w in zip(own, choose_widths(own, sublayers, 0.5), strict=True):
        for values, k in ((p.qk, w.qk), (p.vo, w.vo), (p.mlp, w.mlp)):
            inside += values[1:k].tolist()
            outside += values[k:].tolist()
    assert min(inside) >= max(outside)


def test_every_layer_keeps_something():
    sublayers = find_sublayers(tiny_model("llama"))
    chosen = choose_widths(profiles(sublayers), sublayers, 1e-6)
    assert chosen == [LayerWidths(1, 1, 1)] * 2


def test_queries_can_be_left_whole():
    sublayers = find_sublayers(tiny_model("llama"))
    chosen = choose_widths(profiles(sublayers), sublayers, 0.5, queries=False)
    assert [w.qk for w in chosen] == [4, 4]
