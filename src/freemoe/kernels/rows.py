"""Products in which every token uses rows of its own of a matrix: each row is read where it stands, once for some tokens.

torch cannot multiply scattered rows without copying them first, nor leave out a row for some tokens. These are loops
compiled by numba; where it is not installed, ``rows_available`` says no and the callers use torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freemoe.kernels.optional import importable

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu": 2, "relu": 3}
"""Activations that the compiled loops know, by their name in a configuration (numbers: ``act`` of `row_loops` and `triton_loops`)."""

DTYPES = (torch.float32, torch.bfloat16)
"""What the compiled loops read."""

# Bytes: what is near enough of a common core's caches.
_CACHE = 1 << 19

# Below this many weights a second thread costs more than it brings.
_WORTH_A_THREAD = 1 << 20


def rows_available(dtype: torch.dtype, activation: str = "silu") -> bool:
    """Whether the compiled loops can be used here for this type and activation."""
    return dtype in DTYPES and activation in ACTIVATIONS and importable("numba")


def experts_times(
    x: Tensor, expert: Tensor, mask: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, activation: str
) -> Tensor:
    """The MLP of several tokens, each neuron multiplied by the tokens whose expert has it.

    Args:
        x: (T, d).
        expert: (T,) int64.
        mask: (N, u) bool.
        up: (parts, u, d): gate and up, or fc1 alone.
        up_bias: (parts, u), or None.
        down: (u, d).
        activation: A name in ``ACTIVATIONS``.

    Returns:
        (T, d) of ``x``'s type.
    """
    from freemoe.kernels.row_loops import LOOPS as loops

    matrices, last = memory_of(up), memory_of(down)
    bias = np.zeros((len(up), 0), np.float32) if up_bias is None else up_bias.detach().float().numpy()
    values, owners, members = _padded_rows(x), expert.numpy(), mask.numpy()
    kind = ACTIVATIONS[activation]

    def multiply_neurons(begin: int, end: int) -> np.ndarray:
        out = np.zeros(x.shape, np.float32)
        if len(values) == 1:
            member = members[owners[0]]
            loops.one_expert(values, member, matrices[0], matrices[-1], bias, last, begin, end, kind, out)
            return out
        for some in _token_blocks(values):
            loops.experts(
                values[some], owners[some], members, matrices[0], matrices[-1], bias, last, begin, end, kind, out[some]
            )
        return out

    outputs = in_threads(multiply_neurons, len(last), last.size)
    return torch.from_numpy(sum(outputs[1:], outputs[0])).to(x.dtype)


def heads_times(x: Tensor, mask: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of which each token wants the same dimensions of every head.

    Args:
        x: (T, d).
        mask: (T, head_dim) bool, the dimensions that a token wants.
        matrix: (heads * head_dim, d).
        bias: (heads * head_dim,), or None.

    Returns:
        (T, heads * head_dim) of ``x``'s type, zero where a token wants nothing.
    """
    from freemoe.kernels.row_loops import LOOPS as loops

    values, wanted, memory = _padded_rows(x), mask.numpy(), memory_of(matrix)
    own = np.zeros(0, np.float32) if bias is None else bias.detach().float().numpy()
    out = np.zeros((len(x), len(matrix)), np.float32)

    def multiply_dimensions(begin: int, end: int) -> None:
        for some in _token_blocks(values):
            loops.heads_times(values[some], wanted[some], memory, own, begin, end, out[some])

    in_threads(multiply_dimensions, mask.shape[1], matrix.numel())
    return torch.from_numpy(out).to(x.dtype)


def heads_sum(weights: Tensor, mask: Tensor, matrix: Tensor) -> Tensor:
    """``weights @ matrix``, where each token has the same dimensions of every head and nothing at the others.

    Args:
        weights: (T, heads * head_dim).
        mask: (T, head_dim) bool.
        matrix: (heads * head_dim, d).

    Returns:
        (T, d) of ``weights``' type.
    """
    from freemoe.kernels.row_loops import LOOPS as loops

    values, wanted, memory = float_array(weights), mask.numpy(), memory_of(matrix)

    def sum_dimensions(begin: int, end: int) -> np.ndarray:
        out = np.zeros((len(values), memory.shape[1]), np.float32)
        for some in _token_blocks(out):
            loops.heads_sum(values[some], wanted[some], memory, begin, end, out[some])
        return out

    outputs = in_threads(sum_dimensions, mask.shape[1], matrix.numel())
    return torch.from_numpy(sum(outputs[1:], outputs[0])).to(weights.dtype)


def float_array(x: Tensor) -> np.ndarray:
    """A tensor as float32, contiguous, on the CPU."""
    return x.detach().float().contiguous().numpy()


def _padded_rows(x: Tensor) -> np.ndarray:
    """Tokens (T, d) in rows that are a little longer, so that they lie no power of two apart (`row_loops.add_rows`)."""
    if len(x) == 1:
        return float_array(x)
    held = np.empty((len(x), x.shape[1] + 16), np.float32)
    held[:, : x.shape[1]] = x.detach().float().numpy()
    return held


def _token_blocks(values: np.ndarray) -> list[slice]:
    """Ranges of tokens of which a core's own cache holds one whole range: a row of weights meets all of them there."""
    size = max(8, _CACHE // (4 * values.shape[1]))
    return [slice(begin, begin + size) for begin in range(0, len(values), size)]


def memory_of(tensor: Tensor) -> np.ndarray:
    """A tensor's own memory; numpy has no bfloat16, so that its bits are seen as integers."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "freemoe-rows")


def in_threads(part: Callable[[int, int], Any], rows: int, weights: int) -> list[Any]:
    """Call ``part`` on ranges of rows, in as many threads as torch uses; the loops hold no lock of Python's."""
    threads = max(1, min(torch.get_num_threads(), weights // _WORTH_A_THREAD))
    if threads == 1:
        return [part(0, rows)]
    edges = [rows * i // threads for i in range(threads + 1)]
    # One range is ours: the pool has a thread less to wake.
    others = [_thread_pool(threads - 1).submit(part, a, b) for a, b in itertools.pairwise(edges[1:])]
    return [part(edges[0], edges[1]), *(other.result() for other in others)]
