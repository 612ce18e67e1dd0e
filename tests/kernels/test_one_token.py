"""A decoder layer for one token in compiled loops equals its reference, and says where it does not apply."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freemoe.kernels import one_token
from freemoe.kernels.one_token import (
    AttentionWeights,
    BottleneckHook,
    CompiledLayer,
    LayerWeights,
    LinearWeights,
    MixtureWeights,
    RMSNormWeights,
    compiled_linear,
    one_token_available,
    reference_layer,
    reference_mixture,
)
from freemoe.kernels.rows import ACTIVATIONS, rows_available

HIDDEN, WIDTH, HEADS, KEY_HEADS, EXPERTS, NEURONS, UNITS = 48, 8, 6, 2, 5, 20, 7

pytestmark = pytest.mark.skipif(not rows_available(torch.float32), reason="numba is not installed")


class Made:
    """Random tensors of one seed."""

    def __init__(self, seed=0, dtype=torch.float32):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape):
        return (torch.randn(*shape, generator=self.generator) / shape[-1] ** 0.5).to(self.dtype)

    def linear(self, outputs, inputs, biased):
        return LinearWeights(self.normal(outputs, inputs), self.normal(outputs) if biased else None)

    def norm(self, width):
        return RMSNormWeights(1 + 0.1 * self.normal(width), 1e-5)

    def layer(self, norms="head", biased=True, hook="after", clip=0.0):
        kinds = {"head": (WIDTH, WIDTH), "all": (HEADS * WIDTH, KEY_HEADS * WIDTH)}
        query_norm, key_norm = (self.norm(n) for n in kinds[norms]) if norms in kinds else (None, None)
        attention = AttentionWeights(
            self.linear(HEADS * WIDTH, HIDDEN, biased),
            self.linear(KEY_HEADS * WIDTH, HIDDEN, biased),
            self.linear(KEY_HEADS * WIDTH, HIDDEN, biased),
            self.linear(HIDDEN, HEADS * WIDTH, biased),
            query_norm, key_norm, WIDTH, WIDTH**-0.5, clip,
        )  # fmt: skip
        mixture = MixtureWeights(
            3 * self.normal(EXPERTS, HIDDEN), self.normal(EXPERTS, 2 * NEURONS, HIDDEN),
            self.normal(EXPERTS, HIDDEN, NEURONS), "silu", 3, 2, True,
        )  # fmt: skip
        bottleneck = BottleneckHook(
            self.linear(UNITS, HIDDEN, biased), self.linear(HIDDEN, UNITS, biased), 0.7, hook == "before"
        )
        return LayerWeights(
            self.norm(HIDDEN), attention, self.norm(HIDDEN), mixture, bottleneck if hook != "none" else None
        )

    def token(self, past=9, turned=WIDTH):
        """A token, its place's rotary embedding, and a cache."""
        angle = torch.randn(turned // 2, generator=self.generator).repeat(2)
        keys, values = (self.normal(1, KEY_HEADS, past, WIDTH) for _ in range(2))

        def update(key, value):
            return torch.cat([keys, key.to(self.dtype)], 2), torch.cat([values, value.to(self.dtype)], 2)

        return 5 * self.normal(HIDDEN), angle.cos(), angle.sin(), update


def compare(layer, token, tolerance=1e-05):
    assert one_token_available(layer)
    before = token[0].clone()
    got = CompiledLayer(layer).decode_token(*token)
    assert got.dtype == token[0].dtype
    assert torch.equal(token[0], before)
    torch.testing.assert_close(got.float(), reference_layer(layer, *token), rtol=0, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("norms", ["head", "all", "none"])
@pytest.mark.parametrize("hook", ["after", "before", "none"])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_reference(norms, hook, seed):
    made = Made(seed)
    compare(made.layer(norms, bool(seed), hook, clip=0.5 * seed), made.token())
    # The first token, and a rotary embedding of half a head.
    compare(made.layer(norms, not seed, hook), made.token(0, WIDTH // 2))


@torch.no_grad()
@pytest.mark.parametrize(
    "rule",
    [
        *(
            {"top_k": top_k, "active": min(active, top_k), "normalise": normalise, "renormalise": renormalise}
            for top_k in (1, 3, EXPERTS)
            for active in (1, 3)
            for normalise in (False, True)
            for renormalise in (False, True)
        ),
        *({"activation": activation} for activation in ACTIVATIONS),
    ],
    ids=str,
)
def test_every_rule_of_the_mixture(rule):
    made = Made(2)
    layer = made.layer()
    compare(replace(layer, mixture=replace(layer.mixture, **rule)), made.token())


@torch.no_grad()
def test_bfloat16():
    made = Made(4, torch.bfloat16)
    compare(made.layer(), made.token(), tolerance=0.05)


@torch.no_grad()
@pytest.mark.parametrize("hook", ["after", "before"])
def test_threads(monkeypatch, hook):
    monkeypatch.setattr("freemoe.kernels.rows._WORTH_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    made = Made(5)
    compare(made.layer(hook=hook), made.token())


@torch.no_grad()
def test_weights_that_change_in_place_are_seen():
    made = Made(6)
    layer, token = made.layer(), made.token()
    step = CompiledLayer(layer)
    layer.mixture.up.mul_(2)
    torch.testing.assert_close(step.decode_token(*token), reference_layer(layer, *token), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer(dtype, biased):
    made = Made(7, dtype)
    linear, x = made.linear(33, HIDDEN, biased), made.normal(HIDDEN)
    torch.testing.assert_close(
        compiled_linear(x, linear).float(), linear(x.float()), rtol=0.01, atol=0.02 if biased else 0.01
    )
    if dtype == torch.float32:
        torch.testing.assert_close(compiled_linear(x, linear), linear(x), rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_reference_of_all_experts_is_their_weighted_sum():
    made = Made(8)
    own, x = made.layer().mixture, made.normal(HIDDEN)
    everyone = replace(own, top_k=EXPERTS, active=EXPERTS)
    outputs = []
    for expert in range(EXPERTS):
        gate, up = (own.up[expert] @ x).chunk(2)
        outputs.append(own.down[expert] @ (torch.nn.functional.silu(gate) * up))
    want = torch.softmax(own.router @ x, 0) @ torch.stack(outputs)
    torch.testing.assert_close(reference_mixture(everyone, x), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("what", ["half precision", "another order in memory", "an unknown activation", "no numba"])
def test_what_the_loops_do_not_know(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Made().layer()
    own = layer.mixture
    changes = {
        "half precision": {"up": own.up.half()},
        "another order in memory": {"down": own.down.transpose(1, 2)},
        "an unknown activation": {"activation": "tanh"},
    }
    if what == "no numba":
        monkeypatch.setattr(one_token, "importable", lambda package: False)
    assert not one_token_available(replace(layer, mixture=replace(own, **changes.get(what, {}))))
