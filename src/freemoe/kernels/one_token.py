"""A mixture's decoder layer for one token on a CPU: a reference in torch, and the same in a few compiled loops.

A token that is decoded multiplies every weight once, so that reading them is all the work there is. torch's matrix times
vector reads them at a third of what the memory gives, and a layer of a small model spends as long again between its
calls. Letters: d hidden, N experts, f neurons of one, k experts that run, u units of a hook, T tokens in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from freemoe.kernels.optional import importable
from freemoe.kernels.rows import ACTIVATIONS, DTYPES, float_array, in_threads, memory_of

_tanh = partial(F.gelu, approximate="tanh")
_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_new": _tanh, "gelu_pytorch_tanh": _tanh, "relu": F.relu}

Update = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a token's keys and values (1, key heads, 1, width), and gives those of all tokens, (1, key heads, T, width)."""


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """``weight`` (out, in) and ``bias`` (out,) or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in float32."""
        return F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())


@dataclass(frozen=True, eq=False)
class RMSNormWeights:
    """An RMS norm: its scale (n,) and its epsilon."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., n)."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The attention of a layer with rotary embedding."""

    # With ``key`` and ``value``, what multiplies the normed hidden state; ``output`` ends the sublayer
    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    output: LinearWeights
    query_norm: RMSNormWeights | None  # Of each head, or of all together; None for none. So is ``key_norm``
    key_norm: RMSNormWeights | None
    head_dim: int  # Width of a head
    scale: float  # Of the scores
    clip: float = 0.0  # Largest size of queries, keys and values; 0 for none


@dataclass(frozen=True, eq=False)
class MixtureWeights:
    """A router and its experts."""

    router: Tensor  # (N, d)
    up: Tensor  # (N, 2f, d), gate above up
    down: Tensor  # (N, d, f)
    activation: str  # A name in ``rows.ACTIVATIONS``
    top_k: int  # Experts that the router chooses
    active: int  # How many of them run, the heaviest
    normalise: bool  # Whether the weights of those that it chooses sum to one
    renormalise: bool = False  # Whether the weights of those that run are scaled to the sum of all that it chose


@dataclass(frozen=True, eq=False)
class BottleneckHook:
    """factor * down(relu(up(x))): added to what the mixture sees (``before``), or to what it gives."""

    up: LinearWeights
    down: LinearWeights
    factor: float
    before: bool


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """A decoder layer: norm, attention, residual, norm, mixture, residual."""

    first_norm: RMSNormWeights
    attention: AttentionWeights
    second_norm: RMSNormWeights
    mixture: MixtureWeights
    hook: BottleneckHook | None = None


def reference_layer(layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, update: Update) -> Tensor:
    """One token through a layer: slow and plain.

    Args:
        layer: The layer.
        x: (d,).
        cos: (r,), the rotary embedding of the token's place; so is ``sin``.
        sin: (r,).
        update: Of the cache.
    """
    own, x = layer.attention, x.float()
    inner = layer.first_norm(x)
    parts = [linear(inner) for linear in (own.query, own.key, own.value)]
    for number, norm in enumerate((own.query_norm, own.key_norm)):
        if norm is not None:
            parts[number] = norm(parts[number].view(-1, len(norm.weight))).flatten()
    if own.clip:
        parts = [part.clamp(-own.clip, own.clip) for part in parts]
    query, key, value = (part.view(-1, own.head_dim) for part in parts)
    keys, values = update(_apply_rotary(key, cos, sin)[None, :, None], value[None, :, None])
    group = len(query) // keys.shape[1]
    keys, values = (t[0].float().repeat_interleave(group, dim=0) for t in (keys, values))
    scores = torch.einsum("hi,hti->ht", _apply_rotary(query, cos, sin), keys) * own.scale
    x = x + own.output(torch.einsum("ht,hti->hi", scores.softmax(-1), values).flatten())
    inner = layer.second_norm(x)
    shift = torch.zeros_like(x)
    if layer.hook is not None:
        shift = layer.hook.factor * layer.hook.down(F.relu(layer.hook.up(inner)))
        if layer.hook.before:
            inner, shift = inner + shift, torch.zeros_like(x)
    return x + shift + reference_mixture(layer.mixture, inner)


def _apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (heads, width), of whose dimensions the first are turned."""
    turned, rest = heads[:, : len(cos)], heads[:, len(cos) :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def reference_mixture(mixture: MixtureWeights, x: Tensor) -> Tensor:
    """The mixture alone: (d,) -> (d,) float32."""
    shares = F.linear(x, mixture.router.float()).softmax(-1)
    chosen, index = shares.topk(mixture.top_k)
    if mixture.normalise:
        chosen = chosen / chosen.sum()
    kept = chosen[: mixture.active]
    if mixture.renormalise:
        kept = kept * chosen.sum() / kept.sum()
    result = torch.zeros_like(x)
    for weight, expert in zip(kept, index.tolist(), strict=False):
        gate, up = F.linear(x, mixture.up[expert].float()).chunk(2)
        result = result + weight * F.linear(_ACTIVATIONS[mixture.activation](gate) * up, mixture.down[expert].float())
    return result


def one_token_available(layer: LayerWeights) -> bool:
    """Whether the compiled loops can be used here for a layer's types, devices and activation."""
    return (
        layer.mixture.activation in ACTIVATIONS
        and all(t.device.type == "cpu" and t.dtype in DTYPES and t.is_contiguous() for t in _collect_tensors(layer))
        and importable("numba")
    )


def _collect_tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    return [t for value in getattr(part, "__dict__", {}).values() for t in _collect_tensors(value)]


class CompiledLayer:
    """``reference_layer`` in compiled loops, over the layer's own memory: weights that are changed in place are seen.

    Args:
        layer: For which ``one_token_available`` says yes.
    """

    def __init__(self, layer: LayerWeights) -> None:
        from freemoe.kernels.token_loops import LOOPS

        own, mixture, hook = layer.attention, layer.mixture, layer.hook
        self.loops = LOOPS
        self.attention = own
        self.heads = len(own.query.weight) // own.head_dim
        self.rows = [len(linear.weight) for linear in (own.query, own.key, own.value)]
        linears, query = (own.query, own.key, own.value), memory_of(own.query.weight)
        self.projections = (
            memory_of(layer.first_norm.weight), np.float32(layer.first_norm.eps),
            *(memory_of(linear.weight) for linear in linears), *(_bias_memory(linear, query) for linear in linears),
        )  # fmt: skip
        norms = (own.query_norm, own.key_norm)
        self.norms = (
            *(np.zeros(0, query.dtype) if norm is None else memory_of(norm.weight) for norm in norms),
            *(np.float32(0 if norm is None else norm.eps) for norm in norms), np.float32(own.clip),
        )  # fmt: skip
        self.output, self.output_bias = memory_of(own.output.weight), _bias_memory(own.output, query)
        self.hook = _hook_memory(hook, layer.second_norm.weight)
        self.before, self.units = hook is not None and hook.before, 0 if hook is None else len(hook.up.weight)
        self.second_norm = memory_of(layer.second_norm.weight), np.float32(layer.second_norm.eps)
        self.router = memory_of(mixture.router), mixture.top_k, mixture.active, mixture.normalise, mixture.renormalise
        self.active = mixture.active
        self.experts = memory_of(mixture.up), memory_of(mixture.down), ACTIVATIONS[mixture.activation]
        self.width = mixture.down.shape[2]
        self.weight = 3 * self.width * mixture.down.shape[1] * mixture.active

    def decode_token(self, x: Tensor, cos: Tensor, sin: Tensor, update: Update) -> Tensor:
        """As ``reference_layer``; the result is of ``x``'s type."""
        loops, own = self.loops, self.attention
        hidden = x.detach().to(torch.float32, copy=True).numpy()
        projected = np.empty(sum(self.rows), np.float32)

        def project_rows(begin: int, end: int) -> None:
            loops.project(hidden, *self.projections, begin, end, projected)

        in_threads(project_rows, len(projected), len(projected) * len(hidden))
        edge, last = self.rows[0], self.rows[0] + self.rows[1]
        query, key, value = projected[:edge], projected[edge:last], projected[last:]
        loops.turn(query, key, value, *self.norms, float_array(cos), float_array(sin), own.head_dim)
        states = (torch.from_numpy(part).view(1, -1, 1, own.head_dim).to(x.dtype) for part in (key, value))
        keys, values = (memory_of(state[0]) for state in update(*states))
        attended = np.empty((self.heads, own.head_dim), np.float32)
        query = query.reshape(self.heads, own.head_dim)

        def attend_heads(begin: int, end: int) -> None:
            loops.attend(query, keys, values, np.float32(own.scale), begin, end, attended)

        in_threads(attend_heads, len(keys), 2 * keys.size)
        return torch.from_numpy(self._after_attention(hidden, attended.reshape(-1))).to(x.dtype)

    def _after_attention(self, hidden: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """Everything behind the attention's sums; ``hidden`` is written over."""
        loops, summed, inner = self.loops, np.empty_like(hidden), np.empty_like(hidden)
        index, weights = np.empty(self.active, np.int64), np.empty(self.active, np.float32)

        def multiply_output(begin: int, end: int) -> None:
            loops.times(attended, self.output, begin, end, summed)

        in_threads(multiply_output, len(summed), self.output.size)
        loops.settle(
            hidden, summed, self.output_bias, *self.second_norm, *self.hook, self.before, *self.router,
            inner, index, weights,
        )  # fmt: skip

        def run_experts(begin: int, end: int) -> np.ndarray:
            # One of the threads takes the residual with it.
            out = np.zeros_like(hidden) if begin else hidden
            loops.experts(inner, index, weights, *self.experts, begin, end, out)
            if self.units and not self.before:
                first, last = (self.units * edge // self.width for edge in (begin, end))
                loops.bent(inner, *self.hook, first, last, out)
            return out

        parts = in_threads(run_experts, self.width, self.weight)
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total


def compiled_linear(x: Tensor, linear: LinearWeights) -> Tensor:
    """One token (d,) through a linear layer, in compiled loops: (out,) of x's type."""
    from freemoe.kernels.token_loops import LOOPS as loops

    values, matrix = float_array(x), memory_of(linear.weight)
    out = np.empty(len(matrix), np.float32)
    in_threads(lambda begin, end: loops.times(values, matrix, begin, end, out), len(out), matrix.size)
    result = torch.from_numpy(out)
    return (result if linear.bias is None else result.add_(linear.bias)).to(x.dtype)


def _bias_memory(linear: LinearWeights, kind: np.ndarray) -> np.ndarray:
    return np.zeros(0, kind.dtype) if linear.bias is None else memory_of(linear.bias)


def _hook_memory(hook: BottleneckHook | None, like: Tensor) -> tuple[Any, ...]:
    """Matrices, biases and factor as the loops take them; of no unit where there is no hook."""
    if hook is None:
        hook = BottleneckHook(
            LinearWeights(like.new_zeros(0, len(like))), LinearWeights(like.new_zeros(len(like), 0)), 0.0, False
        )
    up, down = memory_of(hook.up.weight), memory_of(hook.down.weight)
    return up, down, _bias_memory(hook.up, up), _bias_memory(hook.down, up), np.float32(hook.factor)
