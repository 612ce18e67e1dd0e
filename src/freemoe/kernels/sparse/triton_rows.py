"""Products of tokens whose experts have places or bands of a weight off, on an accelerator."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

TOKENS, PLACES = 16, 32
"""Sizes of a block: of tokens of one expert, of places that are looked up at once."""

_TILE = (32, 64)


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


def band_products(
    x: Tensor, weight: Tensor, scales: Tensor, ends: tuple[Tensor, Tensor], tokens: Tensor, blocks: Tensor
) -> Tensor:
    """``x[tokens] @ weight.T`` in which a band of each row of the weight is off; which places that are is found in the tile.

    Args:
        x: (T, K), contiguous.
        weight: (N, K) of the same type, contiguous.
        scales: (G, K) float32: what |weight| is multiplied with, by expert.
        ends: (G, N) int32 each: the columns at both ends of the bands; -1 where a band has none.
        tokens: (n,) int64, the tokens of band experts, by expert.
        blocks: From `blocks_of`.

    Returns:
        (n, N), in the order of ``tokens``.
    """
    loops = _loops()
    assert loops is not None, "ask triton_available first"
    rows, columns = weight.shape
    y = x.new_empty(len(tokens), rows)
    # Triton's interpreter cannot multiply bfloat16.
    wide = x.dtype == torch.float32 or x.device.type == "cpu"
    high, across = _TILE
    loops.band_products[(-(-rows // high), len(blocks))](
        x, weight, y, tokens, blocks, scales, *ends, rows, columns, T=TOKENS, N=high, K=across, WIDE=wide
    )
    return y
