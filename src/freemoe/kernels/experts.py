"""The experts of one MLP, their weights held once: a readable reference, and the ways to compute them at every size.

Letters: T tokens, d hidden, u neurons held, N experts, w neurons of an expert. A neuron is a row of every matrix, and an
expert is a list of rows. Up to some hundred tokens, each row is multiplied by the tokens that use it (`rowwise_experts`, compiled);
more tokens are sorted by expert, and each expert gathers its rows for large products (`grouped_experts`). The whole MLP with a
mask (`masked_experts`) is what gradients, compilers and few tokens without numba get. On a GPU, `triton_experts` does all sizes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from freemoe.kernels.rows import experts_times

TOKENS, NEURONS = 512, 512
"""Tokens and neurons of an expert that are multiplied at once: so much stays in a cache."""

_NARROW = 0.6
"""Experts of such a share of the neurons are read row by row as long as they are not sorted; wider ones up to 64 tokens."""


@dataclass(frozen=True, eq=False)
class MLPWeights:
    """The neurons of an MLP.

    Attributes:
        up: (parts, u, d): gate and up; or fc1 alone.
        down: (u, d), the down projection transposed.
        up_bias: (parts, u), or None.
        down_bias: (d,), or None.
        activation: Between up and down; ``name`` is its name in a configuration.
        name: ``silu``, ``gelu``, ``gelu_new``, ``gelu_pytorch_tanh``, ``relu`` or another.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Callable[[Tensor], Tensor]
    name: str


class ExpertNeurons:
    """What the ways to compute need to know of the index lists, found once.

    ``grouped`` is the least number of tokens that are sorted by expert, ``few`` the least for which rows are not read one by
    one; what is between has a mask. Likely the quickest by the experts' widths: a rule and not a stopwatch, so that the same
    input is computed alike on every machine.

    Args:
        index: (N, w) integers, the rows of each expert, ascending; the rest of a shorter list is -1.
        neurons: u.
    """

    def __init__(self, index: Tensor, neurons: int) -> None:
        self.rows = [row[row >= 0].long() for row in index.cpu()]
        # Rows of each expert that are multiplied at once; a slice where they lie together and need not be gathered.
        self.parts = [[_as_slice(some) for some in rows.split(NEURONS)] for rows in self.rows]
        self.neurons = neurons
        self.grouped, self.few = 256, 256 if max(map(len, self.rows)) <= _NARROW * neurons else 64
        self._masks: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def neuron_mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(N, u) of zeros and ones."""
        key = (dtype, device)
        if key not in self._masks:
            held = torch.zeros(len(self.rows), self.neurons, dtype=dtype)
            for row, rows in zip(held, self.rows, strict=True):
                row[rows] = 1
            self._masks[key] = held.to(device)
        return self._masks[key]


def _as_slice(rows: Tensor) -> slice | Tensor:
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def index_mask(index: Tensor, neurons: int, dtype: torch.dtype) -> Tensor:
    """``Plan.neuron_mask`` in tensor operations alone: (N, w) rows, -1 where a list is short -> (N, u) zeros and ones."""
    # One column more takes what the short lists are filled up with.
    held = torch.zeros(len(index), neurons + 1, dtype=dtype, device=index.device)
    return held.scatter(1, torch.where(index < 0, neurons, index).long(), 1.0)[:, :neurons]


def reference_experts(x: Tensor, expert: Tensor, weights: MLPWeights, index: Tensor) -> Tensor:
    """Every token through the rows of its expert, one after the other (ToMoE Eq. 13): slow and plain.

    Args:
        x: (T, d).
        expert: (T,) int64.
        weights: Of the layer.
        index: (N, w) rows, -1 where a list is short.

    Returns:
        (T, d).
    """
    outputs = []
    for token, number in zip(x, expert.tolist(), strict=True):
        rows = index[number][index[number] >= 0].long()
        parts = [matrix[rows] @ token for matrix in weights.up]
        if weights.up_bias is not None:
            parts = [part + bias[rows] for part, bias in zip(parts, weights.up_bias, strict=True)]
        inner = weights.activation(parts[0])
        if len(parts) == 2:
            inner = inner * parts[1]
        output = inner @ weights.down[rows]
        outputs.append(output if weights.down_bias is None else output + weights.down_bias)
    return torch.stack(outputs)


def masked_experts(x: Tensor, expert: Tensor, weights: MLPWeights, mask: Tensor) -> Tensor:
    """The whole MLP, then zero at what a token's expert does not use (ToMoE Eq. 17).

    Args:
        x: (T, d).
        expert: (T,) int64.
        weights: Of the layer.
        mask: (N, u), of ``x``'s type.

    Returns:
        (T, d); differentiable, and without Python that depends on values.
    """
    bias = None if weights.up_bias is None else weights.up_bias.flatten()
    inner = F.linear(x, weights.up.flatten(0, 1), bias)
    inner = _apply_activation(inner, weights, len(weights.up))
    chosen = mask[expert]
    # Memory traffic is all that this way adds to the dense layer: write into what is there where nobody looks back.
    inner = inner * chosen if inner.requires_grad else inner.mul_(chosen)
    if weights.down_bias is None:
        return inner @ weights.down
    return torch.addmm(weights.down_bias, inner, weights.down)


def masked_by_lists(x: Tensor, expert: Tensor, weights: MLPWeights, index: Tensor) -> Tensor:
    """`masked_experts` by the experts' lists (N, w) themselves, -1 where one is short."""
    return masked_experts(x, expert, weights, index_mask(index, len(weights.down), x.dtype))


def _apply_activation(inner: Tensor, weights: MLPWeights, parts: int) -> Tensor:
    """(T, parts * u) -> (T, u)."""
    if parts == 1:
        return weights.activation(inner)
    gate, up = inner.chunk(2, dim=-1)
    if inner.requires_grad:
        return weights.activation(gate) * up
    return _activate_inplace(gate, weights).mul_(up)


def _activate_inplace(gate: Tensor, weights: MLPWeights) -> Tensor:
    """The activation, in place where torch has it so."""
    if weights.name == "silu":
        return F.silu(gate, inplace=True)
    if weights.name == "relu":
        return F.relu_(gate)
    return weights.activation(gate)


class _ScratchBuffers(threading.local):
    """Memory for gathered rows and intermediate activations, used again: fresh pages cost as much as writing them."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_buffer(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Memory of a shape and of ``like``'s type; what it holds is lost at the next call with this name."""
        key, size = (name, like.dtype), math.prod(shape)
        if key not in self.buffers or len(self.buffers[key]) < size:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self.buffers[key] = torch.empty(size, dtype=like.dtype)
        return self.buffers[key][:size].view(shape)


_SCRATCH = _ScratchBuffers()


def grouped_experts(x: Tensor, expert: Tensor, weights: MLPWeights, plan: ExpertNeurons) -> Tensor:
    """Sort tokens by expert; each expert gathers its rows, some at a time, and multiplies them. CPU, no gradients.

    Gathered rows make products of one large size, which is worth more than what the copy costs: runs of neighbouring
    rows, multiplied where they stand, are slower as soon as they are shorter than some hundred.

    Args:
        x: (T, d).
        expert: (T,) int64.
        weights: Of the layer.
        plan: Of the layer.

    Returns:
        (T, d).
    """
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=len(plan.rows)).tolist()
    output = torch.empty_like(x)
    begin = 0
    for own, count in zip(plan.parts, counts, strict=True):
        for start in range(begin, begin + count, TOKENS):
            tokens = order[start : min(start + TOKENS, begin + count)]
            output.index_copy_(0, tokens, _expert_forward(x.index_select(0, tokens), weights, own))
        begin += count
    return output


def _expert_forward(x: Tensor, weights: MLPWeights, neuron_rows: list[slice | Tensor]) -> Tensor:
    """The tokens of one expert (T', d) through its neurons -> (T', d)."""
    parts = len(weights.up)
    output = torch.zeros_like(x) if weights.down_bias is None else weights.down_bias.repeat(len(x), 1)
    for rows in neuron_rows:
        ups = [_gather_rows(matrix, rows, f"up{part}") for part, matrix in enumerate(weights.up)]
        count = len(ups[0])
        inner = _SCRATCH.get_buffer("inner", x, parts, len(x), count)
        for part, up in enumerate(ups):
            torch.mm(x, up.T, out=inner[part])
        if weights.up_bias is not None:
            inner.add_(weights.up_bias[:, rows].unsqueeze(1))
        hidden = _activate_inplace(inner[0], weights)
        if parts == 2:
            hidden.mul_(inner[1])
        torch.addmm(output, hidden, _gather_rows(weights.down, rows, "down"), out=output)
    return output


def _gather_rows(matrix: Tensor, rows: slice | Tensor, name: str) -> Tensor:
    """Rows of a matrix, where they stand or gathered into memory of this name."""
    if isinstance(rows, slice):
        return matrix[rows]
    return torch.index_select(matrix, 0, rows, out=_SCRATCH.get_buffer(name, matrix, len(rows), matrix.shape[1]))


def rowwise_experts(x: Tensor, expert: Tensor, weights: MLPWeights, plan: ExpertNeurons) -> Tensor:
    """Each neuron is read where it stands, and multiplied by the tokens that use it.

    On a CPU where ``rows_available`` says yes, without gradients.

    Args:
        x: (T, d).
        expert: (T,) int64.
        weights: Of the layer.
        plan: Of the layer.

    Returns:
        (T, d).
    """
    mask = plan.neuron_mask(torch.bool, x.device)
    output = experts_times(x, expert, mask, weights.up, weights.up_bias, weights.down, weights.name)
    return output if weights.down_bias is None else output.add_(weights.down_bias)
