"""Products with chosen rows of a matrix for one token, every row read once from where it stands.

Reading memory is what one token costs, and torch cannot multiply scattered rows without copying them first. These are
loops compiled by numba; where it is not installed, ``rows_available`` says no and the callers use torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu": 2, "relu": 3}
"""Activations that the compiled loops know, by their name in a configuration (numbers: ``row_loops.act``)."""

DTYPES = (torch.float32, torch.bfloat16)

# Below this many weights a second thread costs more than it brings.
_WORTH_A_THREAD = 1 << 20


def rows_available(dtype: torch.dtype, activation: str = "silu") -> bool:
    """Whether the compiled loops can be used here for this type and activation."""
    return dtype in DTYPES and activation in ACTIVATIONS and _loops_or_none() is not None


def expert_rows(
    x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, rows: np.ndarray, activation: str
) -> Tensor:
    """The MLP of chosen neurons for one token: down[rows].T @ act(...) (ToMoE Eq. 13).

    Args:
        x: (d,).
        up: (parts, u, d): gate and up, or fc1 alone.
        up_bias: (parts, u), or None.
        down: (u, d).
        rows: (w,) int64, ascending.
        activation: A name in ``ACTIVATIONS``.

    Returns:
        (d,) of ``x``'s type.
    """
    loops = _loops()
    bias = None if up_bias is None else up_bias.detach().float().numpy()
    values, matrices, last = x.detach().float().numpy(), tuple(_memory(up)), _memory(down)
    own = np.zeros((len(up), 0), np.float32) if bias is None else bias
    loop = loops.gated if len(matrices) == 2 else loops.plain

    def part(begin: int, end: int) -> np.ndarray:
        out = np.zeros(len(values), np.float32)
        loop(values, *matrices, own, last, rows[begin:end], ACTIVATIONS[activation], out)
        return out

    outputs = _in_threads(part, len(rows), len(rows) * len(x) * (len(up) + 1))
    return torch.from_numpy(sum(outputs[1:], outputs[0])).to(x.dtype)


def few_tokens(
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
    loops = _loops()
    matrices, last = _memory(up), _memory(down)
    bias = np.zeros((len(up), 0), np.float32) if up_bias is None else up_bias.detach().float().numpy()
    values, owners, members = x.detach().float().contiguous().numpy(), expert.numpy(), mask.numpy()

    def part(begin: int, end: int) -> np.ndarray:
        out = np.zeros(values.shape, np.float32)
        kind = ACTIVATIONS[activation]
        loops.few(values, owners, members, matrices[0], matrices[-1], bias, last, begin, end, kind, out)
        return out

    outputs = _in_threads(part, len(last), last.size)
    return torch.from_numpy(sum(outputs[1:], outputs[0])).to(x.dtype)


def rows_times(matrix: Tensor, bias: Tensor | None, x: Tensor, rows: np.ndarray) -> Tensor:
    """``matrix[rows] @ x + bias[rows]`` at the rows, zero at the others.

    Args:
        matrix: (n, d).
        bias: (n,), or None.
        x: (d,).
        rows: (k,) int64, ascending.

    Returns:
        (n,) of ``x``'s type.
    """
    loops = _loops()
    out = np.zeros(len(matrix), np.float32)
    values, memory = x.detach().float().numpy(), _memory(matrix)
    own = np.zeros(0, np.float32) if bias is None else bias.detach().float().numpy()

    def part(begin: int, end: int) -> None:
        loops.times(values, memory, own, rows[begin:end], out)

    _in_threads(part, len(rows), len(rows) * len(x))
    return torch.from_numpy(out).to(x.dtype)


def rows_sum(matrix: Tensor, weights: Tensor, rows: np.ndarray) -> Tensor:
    """``weights[rows] @ matrix[rows]``.

    Args:
        matrix: (n, d).
        weights: (n,).
        rows: (k,) int64, ascending.

    Returns:
        (d,) of ``weights``' type.
    """
    loops = _loops()
    values, memory = weights.detach().float().numpy(), _memory(matrix)

    def part(begin: int, end: int) -> np.ndarray:
        out = np.zeros(memory.shape[1], np.float32)
        loops.total(values, memory, rows[begin:end], out)
        return out

    outputs = _in_threads(part, len(rows), len(rows) * matrix.shape[1])
    return torch.from_numpy(sum(outputs[1:], outputs[0])).to(weights.dtype)


def _memory(tensor: Tensor) -> np.ndarray:
    """A tensor's own memory; numpy has no bfloat16, so that its bits are seen as integers."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _loops() -> ModuleType:
    loops = _loops_or_none()
    assert loops is not None, "ask rows_available first"
    return loops


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "freemoe-rows")


def _in_threads(part: Callable[[int, int], Any], rows: int, weights: int) -> list[Any]:
    """Call ``part`` on ranges of rows, in as many threads as torch uses; the loops hold no lock of Python's."""
    threads = max(1, min(torch.get_num_threads(), weights // _WORTH_A_THREAD))
    if threads == 1:
        return [part(0, rows)]
    edges = [rows * i // threads for i in range(threads + 1)]
    # One range is ours: the pool has a thread less to wake.
    others = [_pool(threads - 1).submit(part, a, b) for a, b in itertools.pairwise(edges)]
    return [part(edges[0], edges[1]), *(other.result() for other in others)]


@cache
def _loops_or_none() -> ModuleType | None:
    """The compiled loops, or None without numba; loaded late, because numba takes a second to load."""
    try:
        from freemoe.kernels import row_loops
    except ImportError:
        return None
    return row_loops
