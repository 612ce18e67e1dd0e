"""The kernels of `sparse.rows` and `sparse.bands`; import them through those, which know what to do without Triton.

Names of sizes: T tokens and P places of a block; a tile of a weight has N rows and K columns.
"""

# Compile-time constants of a kernel are written in capitals.
from __future__ import annotations

import triton.language as tl  # pyright: ignore[reportMissingImports]

from freemoe.kernels.triton_loops import jit


@jit
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


@jit
def score_at(weight, scales, start, column, alive):
    """Importance of the weights at some columns, (rows,) each; what no column says is 0."""
    known = alive & (column >= 0)
    value = tl.load(weight + start + column, mask=known, other=0.0).to(tl.float32)
    return tl.abs(value) * tl.load(scales + column, mask=known, other=0.0)


@jit
def band_products(
    x, weight, y, tokens, blocks, scales, low, high, rows, columns,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Set y[j, row] = sum of weight[row, c] * x[tokens[j], c] over the columns c outside of a band, for rows and tokens of a block.

    ``scales`` (experts, columns) float32; ``low`` and ``high`` (experts, rows) int32: the columns at the band's ends, -1 for none.
    ``UPCAST``: multiply in float32, whatever the type.
    """
    row = tl.program_id(0) * N + tl.arange(0, N)
    block = blocks + tl.program_id(1) * 3
    expert = tl.load(block)
    place = tl.load(block + 1) + tl.arange(0, T)
    alive = place < tl.load(block + 2)
    token = tl.load(tokens + place, mask=alive, other=0)
    own = row < rows
    start = row.to(tl.int64) * columns
    scales += expert * columns
    first = tl.load(low + expert * rows + row, mask=own, other=-1)
    last = tl.load(high + expert * rows + row, mask=own, other=-1)
    least = tl.where(first >= 0, score_at(weight, scales, start, first, own), -1.0)
    most = tl.where(last >= 0, score_at(weight, scales, start, last, own), float("inf"))
    total = tl.zeros((T, N), dtype=tl.float32)
    for begin in range(0, columns, K):
        column = begin + tl.arange(0, K)
        inside = column < columns
        w = tl.load(weight + start[:, None] + column[None, :], mask=own[:, None] & inside[None, :], other=0.0)
        # Equal scores stand in the order of their columns.
        score = tl.abs(w.to(tl.float32)) * tl.load(scales + column, mask=inside, other=0.0)[None, :]
        reached = (score > least[:, None]) | ((score == least[:, None]) & (column[None, :] >= first[:, None]))
        beyond = (score > most[:, None]) | ((score == most[:, None]) & (column[None, :] >= last[:, None]))
        w = tl.where(reached & (beyond == 0), 0.0, w)
        mine = alive[:, None] & inside[None, :]
        values = tl.load(x + token[:, None] * columns + column[None, :], mask=mine, other=0.0)
        if UPCAST:
            total += tl.dot(values.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")
        else:
            total += tl.dot(values, tl.trans(w.to(values.dtype)), input_precision="ieee")
    to = y + place[:, None] * rows + row[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=alive[:, None] & own[None, :])
