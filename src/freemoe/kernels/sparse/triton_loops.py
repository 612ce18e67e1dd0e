"""The kernel of `sparse.triton_rows`; import it through that, which knows what to do without Triton.

Names of sizes: T tokens and P places of a block.
"""

# Compile-time constants of a kernel are written in capitals.
from __future__ import annotations

import sys

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("triton is not installed") from error


@triton.jit
def take_out(x, weight, y, tokens, blocks, table, rows, columns, T: tl.constexpr, P: tl.constexpr):
    """Set y[t, row] -= sum of weight[row, c] * x[t, c] over the places (row, c) of an expert, for a block of its tokens.

    ``blocks`` (blocks, 3): expert, first place in ``tokens``, place after the last. ``table`` (experts, 2): addresses of its places
    (int16: the lowest 16 bits of flat ones) and of its rows' ends (int32).
    """
    row = tl.program_id(0)
    block = blocks + tl.program_id(1) * 3
    expert = tl.load(block)
    place = tl.load(block + 1) + tl.arange(0, T)
    alive = place < tl.load(block + 2)
    token = tl.load(tokens + place, mask=alive, other=0)
    places = tl.load(table + expert * 2).to(tl.pointer_type(tl.int16))
    ends = tl.load(table + expert * 2 + 1).to(tl.pointer_type(tl.int32))
    first = tl.load(ends + row)
    last = tl.load(ends + row + 1)
    start = row.to(tl.int64) * columns
    total = tl.zeros((T,), dtype=tl.float32)
    for begin in range(first, last, P):
        j = begin + tl.arange(0, P)
        inside = j < last
        column = (tl.load(places + j, mask=inside, other=0).to(tl.int64) - start) & 0xFFFF
        column = tl.where(inside, column, 0)
        w = tl.load(weight + start + column, mask=inside, other=0.0).to(tl.float32)
        own = alive[:, None] & inside[None, :]
        values = tl.load(x + token[:, None] * columns + column[None, :], mask=own, other=0.0).to(tl.float32)
        total += tl.sum(values * w[None, :], axis=1)
    to = y + token * rows + row
    tl.store(to, (tl.load(to, mask=alive, other=0.0).to(tl.float32) - total).to(y.dtype.element_ty), mask=alive)


LOOPS = sys.modules[__name__]
"""This module, under a name that can be imported from it."""
