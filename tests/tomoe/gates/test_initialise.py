"""Where training begins: worths against a loop over single masks, clusters, and offsets on one scale."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from freemoe.kernels.gates import route_tokens
from freemoe.models.sublayers import CONVERTIBLE, find_sublayers
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.gates.hypernetwork import Hypernetwork
from freemoe.tomoe.gates.initialise import (
    LayerImportance,
    cluster_tokens,
    initial_logits,
    initialise_gates,
    measure_layer_importance,
)
from freemoe.tomoe.structures.masked import per_head
from tests.tiny import tiny_model
from tests.tomoe.gates.test_train import recipe


def blocks(rows=5, length=12):
    ids = torch.randint(3, 288, (rows, length), generator=torch.Generator().manual_seed(1))
    return PackedBlocks(ids, torch.arange(length).expand(rows, length))


def slow(model, number, router, text):
    """Masks that are leaves, one row at a time, gradients squared by the definition."""
    layer = find_sublayers(model)[number]
    h, n = layer.rotary.head_dim, len(router[0])
    qk, vo, ranked = torch.zeros(layer.rotary.num_bits), torch.zeros(h), torch.zeros(h)
    mlp, counts = torch.zeros(n, layer.intermediate_size), torch.zeros(n)
    for row in range(len(text)):
        ids = text.ids[row : row + 1]
        bits = torch.ones(layer.rotary.num_bits, requires_grad=True)
        values = torch.ones(1, text.row_length, h, requires_grad=True)
        neurons = torch.ones(1, text.row_length, layer.intermediate_size, requires_grad=True)
        seen = []
        kept = layer.rotary.expand_bits(bits)
        hooks = [
            layer.q.register_forward_hook(lambda m, a, out, kept=kept: per_head(out, kept, h)),
            layer.k.register_forward_hook(lambda m, a, out, kept=kept: per_head(out, kept, h)),
            layer.v.register_forward_hook(lambda m, a, out, values=values: per_head(out, values, h)),
            layer.o.register_forward_pre_hook(lambda m, a, values=values: (per_head(a[0], values, h),)),
            layer.up[0].register_forward_pre_hook(lambda m, a, seen=seen: seen.append(a[0][0].detach())),
            layer.down.register_forward_pre_hook(lambda m, a, neurons=neurons: (a[0] * neurons,)),
        ]
        logits = model(ids, use_cache=False).logits
        F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
        for hook in hooks:
            hook.remove()
        expert = route_tokens(seen[0], *router)
        qk += bits.grad**2
        vo += (values.grad[0] ** 2).sum(0)
        ranked += sum(token.sort(descending=True).values for token in values.grad[0] ** 2)
        mlp.index_add_(0, expert, neurons.grad[0] ** 2)
        counts += torch.bincount(expert, minlength=n)
    tokens = text.ids.numel()
    overall = mlp.sum(0) / tokens
    return LayerImportance(
        *router, qk / tokens, vo / tokens, ranked / tokens, (mlp + 64 * overall) / (counts + 64)[:, None]
    )


@pytest.mark.parametrize("family", CONVERTIBLE)
def test_worths_are_squared_gradients_of_masks(family):
    model = tiny_model(family)
    for p in model.parameters():
        p.requires_grad_(False)
    sublayers, text = find_sublayers(model), blocks()
    routers = cluster_tokens(model, sublayers, text, 3, seed=0)
    found = measure_layer_importance(model, sublayers, text, routers)
    for number, own in enumerate(found):
        expected = slow(model, number, routers[number], text)
        for name in ("qk", "vo", "vo_ranked", "mlp"):
            torch.testing.assert_close(getattr(own, name), getattr(expected, name), rtol=1e-3, atol=1e-10)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())


def test_clusters_send_tokens_to_the_nearest_centre():
    model = tiny_model("llama")
    for weight, bias in cluster_tokens(model, find_sublayers(model), blocks(), 4, seed=0):
        x = torch.randn(50, 32, generator=torch.Generator().manual_seed(4))
        assert torch.equal(route_tokens(x, weight, bias), torch.cdist(x, weight).argmin(-1))


@pytest.fixture(scope="module")
def measured():
    """A model's layers, and what they are worth."""
    model = tiny_model("llama")
    sublayers, text = find_sublayers(model), blocks()
    routers = cluster_tokens(model, sublayers, text, 3, seed=0)
    return sublayers, measure_layer_importance(model, sublayers, text, routers)


def test_offsets_compare_worth_per_weight_over_all_layers(measured):
    sublayers, worth = measured
    values, worths_per_weight = [], []
    for layer, own, start in zip(sublayers, worth, initial_logits(worth, sublayers), strict=True):
        per_dim = 32 * (layer.heads + layer.kv_heads)
        values += [*start.vo.tolist(), *start.qk.tolist(), *start.mlp.flatten().tolist()]
        worths_per_weight += (own.vo / per_dim).tolist() + (own.qk / (2 * per_dim)).tolist()
        worths_per_weight += (own.mlp / (3 * 32)).flatten().tolist()
    order = sorted(range(len(values)), key=lambda i: worths_per_weight[i])
    ranked = [values[i] for i in order]
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(ranked))
    assert max(ranked) > min(ranked) + 1


def test_a_quiet_hypernetwork_says_the_offsets(measured):
    sublayers, worth = measured
    net = Hypernetwork(sublayers, recipe())
    initialise_gates(net, worth, sublayers)
    with torch.no_grad():
        for own, start in zip(net(), initial_logits(worth, sublayers), strict=True):
            assert torch.equal(own.mlp, start.mlp)
            assert torch.equal(own.qk, start.qk)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(4))
    router = net.mlp[0].router
    assert torch.equal(router(x).argmax(-1), route_tokens(x, worth[0].router_weight, worth[0].router_bias))
