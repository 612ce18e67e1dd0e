"""What experts have off, taken out of the products of their tokens on an accelerator."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

TOKENS, PLACES = 16, 32
"""Sizes of a block: of tokens of one expert, of places that are looked up at once."""


@cache
def _loops() -> ModuleType | None:
    try:
        from freemoe.kernels.sparse.triton_loops import LOOPS
    except ImportError:
        return None
    return LOOPS


def triton_available() -> bool:
    """Whether Triton is installed."""
    return _loops() is not None


def blocks_of(starts: np.ndarray, size: int = TOKENS) -> Tensor:
    """Cut every expert's tokens into blocks.

    Args:
        starts: (G + 1,) int64: where each expert's tokens begin.
        size: Of a block.

    Returns:
        (blocks, 3) int64: expert, first token, the token after the last.
    """
    found = [
        (expert, first, min(first + size, end))
        for expert, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False))
        for first in range(begin, end, size)
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 3)


def take_out(x: Tensor, weight: Tensor, y: Tensor, table: Tensor, tokens: Tensor, blocks: Tensor) -> None:
    """Take what experts have off out of ``y``, in place.

    Args:
        x: (T, K), contiguous.
        weight: (N, K), contiguous.
        y: (T, N), contiguous: the products, of any floating type.
        table: (G, 2) int64 addresses, see `triton_loops.take_out`.
        tokens: (n,) int64, the tokens that have something off, by expert.
        blocks: From `blocks_of`.
    """
    loops = _loops()
    assert loops is not None, "ask triton_available first"
    rows, columns = weight.shape
    loops.take_out[(rows, len(blocks))](x, weight, y, tokens, blocks, table, rows, columns, T=TOKENS, P=PLACES)
