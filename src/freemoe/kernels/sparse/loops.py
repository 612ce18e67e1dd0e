"""The loops of `sparse.rows`, compiled by numba at their first call. Import it through `rows`.

The tokens of one expert walk through its places together. Rows are taken in blocks, so that a matrix's numbers are still
near the core when what is off is looked up among them.
"""

from __future__ import annotations

import sys

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from freemoe.kernels.row_loops import as_float32, jit

ROWS = 64
"""Rows of a block."""

AHEAD = 16
"""So many places ahead numbers are fetched; the places are so much longer than they are many."""

CACHE = 1 << 19
"""Bytes of tokens that are near enough of a core."""


def _make_pointer(to):
    """A function of compiled code: the array that begins at an address; whoever calls it keeps that alive."""

    @intrinsic
    def pointer(context, address):
        def code(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(to)(types.uint64), code

    return pointer


@intrinsic
def prefetch_number(context, array, place):
    """Have a number of an array (N,) brought near, without waiting for it; a place beyond its end does no harm."""

    def code(context, builder, signature, arguments):
        own = context.make_array(signature.args[0])(context, builder, arguments[0])
        at = builder.bitcast(builder.gep(own.data, [arguments[1]]), ir.PointerType(ir.IntType(8)))
        kind = ir.FunctionType(ir.VoidType(), [at.type, *[ir.IntType(32)] * 3])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(call, [at, *(ir.Constant(ir.IntType(32), n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.uint64), code


_shorts, _ints = _make_pointer(types.uint16), _make_pointer(types.uint32)


def round_to_type(value, like):
    """A float32 as a number of a matrix's own type."""
    raise NotImplementedError(f"{type(like)} is only known to compiled code")


@overload(round_to_type, inline="always")
def _typed_rounded(value, like):
    if isinstance(like, types.Float):
        return lambda value, like: value

    def round_to_bfloat16(value, like):
        # To the nearest bfloat16, ties to even; a NaN stays one. Looked at as integers, as fast arithmetic knows no NaN.
        bits = np.float32(value).view(np.uint32)
        high = bits >> np.uint32(16)
        near = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
        return np.uint16(near if (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000) else high | np.uint32(64))

    return round_to_bfloat16


@jit
def transpose_tokens(x, tokens, first, count, width, to):
    """Set to[i, t] = x[tokens[first + t], i] for ``count`` tokens, and 0 for one more where ``width`` has it; ``to`` is flat."""
    size = x.shape[1]
    # Some columns at a time: what is written lies so many lines apart that no more of them stay near the core.
    for begin in range(0, size, 16):
        end = min(begin + 16, size)
        for t in range(count):
            row = x[tokens[first + t], begin:end]
            for i in range(end - begin):
                to[(begin + i) * width + t] = as_float32(row[i])
    if count < width:
        for i in range(size):
            to[i * width + count] = np.float32(0)


@jit
def sum_token_pair(xt, weight, origin, columns, places, ends, begin, end, out):
    """Set out[0:2, r] = the sum of weight[r, c] * xt[c, 0:2] over a row's places c, for the rows r of [begin, end).

    ``weight`` is flat and begins at the row ``origin``.
    """
    size, one, two, ahead = np.uint64(columns), np.uint64(1), np.uint64(2), np.uint64(AHEAD)
    to, rows = np.uint64(0), np.uint64(end - begin)
    for r in range(np.uint64(begin), np.uint64(end)):
        start = (r - np.uint64(origin)) * size
        low = np.uint16(r * size)
        a = b = np.float32(0)
        for j in range(np.uint64(ends[r]), np.uint64(ends[r + one])):
            # The 16 bits of a flat place, less those of the row's start, are the column.
            c = np.uint64(np.uint16(places[j] - low))
            # Places as far apart as 16 bits reach; beyond, another number is fetched, which costs no more.
            prefetch_number(weight, start + c + np.uint64(np.uint16(places[j + ahead] - places[j])))  # pyright: ignore[reportCallIssue]
            value = as_float32(weight[start + c])
            a += value * xt[c * two]
            b += value * xt[c * two + one]
        out[to] = a
        out[to + rows] = b
        to += one


@jit
def sum_token_group(xt, width, weight, origin, columns, places, ends, begin, end, out):
    """The same for ``width`` tokens, and two places at a time: what is summed is loaded and stored half as often."""
    size, one, step, ahead = np.uint64(columns), np.uint64(1), np.uint64(width), np.uint64(AHEAD)
    to, rows = np.uint64(0), np.uint64(end - begin)
    # Of a length that is no constant: loops of one are unrolled, and then not vectorised.
    held = np.empty(width, np.float32)
    for r in range(np.uint64(begin), np.uint64(end)):
        start = (r - np.uint64(origin)) * size
        low = np.uint16(r * size)
        for t in range(len(held)):
            held[t] = np.float32(0)
        j, last = np.uint64(ends[r]), np.uint64(ends[r + one])
        while j < last:
            k = min(j + one, last - one)
            c, d = np.uint64(np.uint16(places[j] - low)), np.uint64(np.uint16(places[k] - low))
            prefetch_number(weight, start + c + np.uint64(np.uint16(places[j + ahead] - places[j])))  # pyright: ignore[reportCallIssue]
            prefetch_number(weight, start + c + np.uint64(np.uint16(places[j + ahead + one] - places[j])))  # pyright: ignore[reportCallIssue]
            v = as_float32(weight[start + c])
            w = as_float32(weight[start + d]) if k > j else np.float32(0)
            first, second = xt[c * step : (c + one) * step], xt[d * step : (d + one) * step]
            for t in range(len(held)):
                held[t] += v * first[t] + w * second[t]
            j += one + one
        for t in range(np.uint64(width)):
            out[t * rows + to] = held[t]
        to += one


@jit
def dense_products(x, matrix, begin, end, out):
    """Set out[t, r] = matrix[r] x[t] for the rows [begin, end): four rows and two tokens at a time."""
    tokens = len(x)
    for r in range(begin, end, 4):
        # Rows computed twice cost less than two or three that are computed alone.
        r1, r2, r3 = min(r + 1, end - 1), min(r + 2, end - 1), min(r + 3, end - 1)
        m0, m1, m2, m3 = matrix[r], matrix[r1], matrix[r2], matrix[r3]
        for t in range(0, tokens, 2):
            u = min(t + 1, tokens - 1)
            a, b = x[t], x[u]
            p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = np.float32(0)
            for i in range(matrix.shape[1]):
                v, w = a[i], b[i]
                f0, f1, f2, f3 = m0[i], m1[i], m2[i], m3[i]
                p0 += f0 * v
                p1 += f1 * v
                p2 += f2 * v
                p3 += f3 * v
                q0 += f0 * w
                q1 += f1 * w
                q2 += f2 * w
                q3 += f3 * w
            out[t, r], out[t, r1], out[t, r2], out[t, r3] = p0, p1, p2, p3
            out[u, r], out[u, r1], out[u, r2], out[u, r3] = q0, q1, q2, q3


@jit
def _token_groups(starts, columns):
    """Tokens that walk together: (blocks, 4) of first, count, width and expert; as many as a core's own cache holds."""
    most = min(256, max(8, CACHE // (4 * columns)))
    made = 0
    for g in range(len(starts) - 1):
        made += (starts[g + 1] - starts[g] + most - 1) // most
    found, made = np.empty((made, 4), np.int64), 0
    for g in range(len(starts) - 1):
        for first in range(starts[g], starts[g + 1], most):
            count = min(most, starts[g + 1] - first)
            found[made, 0], found[made, 1], found[made, 2], found[made, 3] = first, count, max(2, count), g
            made += 1
    return found


@jit
def take_block(blocks, turned, tokens, table, size, weight, origin, columns, begin, end, sums, y, left):
    """Take what experts have off out of the rows [begin, end) of a matrix with ``size`` rows; ``y`` begins at the row ``left``."""
    at, rows = 0, end - begin
    for k in range(len(blocks)):
        first, count, width, g = blocks[k, 0], blocks[k, 1], blocks[k, 2], blocks[k, 3]
        places = carray(_shorts(table[g, 0]), (1 << 62,))  # pyright: ignore[reportCallIssue]
        ends = carray(_ints(table[g, 1]), (size + 1,))  # pyright: ignore[reportCallIssue]
        xt = turned[at : at + width * columns]
        if width == 2:
            sum_token_pair(xt, weight, origin, columns, places, ends, begin, end, sums)
        else:
            sum_token_group(xt, width, weight, origin, columns, places, ends, begin, end, sums)
        for t in range(count):
            row, less = y[tokens[first + t], begin - left : end - left], sums[t * rows : (t + 1) * rows]
            for r in range(rows):
                row[r] = round_to_type(as_float32(row[r]) - less[r], row[r])
        at += width * columns


@jit
def copy_as_float32(x, to):
    """Set to (n, K) = x (n, K), as float32."""
    for t in range(len(x)):
        row, out = x[t], to[t]
        for i in range(len(row)):
            out[i] = as_float32(row[i])


@jit
def take_out(x, tokens, starts, table, matrix, multiply, begin, end, y):
    """Take what experts have off out of y (T, N), for the rows [begin, end) of a matrix (N, K).

    Args:
        x: (T, K); bfloat16 as uint16, as in ``matrix`` and ``y``.
        tokens: (n,) int64, the tokens that have something off, by expert.
        starts: (G + 1,) int64, where in it each expert's begin.
        table: (G, 2) uint64: addresses of its places (uint16) and of its rows' ends (N + 1,) uint32.
        matrix: (N, K), contiguous.
        multiply: Set ``y`` to the products first; else they stand there.
        begin: The first row.
        end: The row after the last.
        y: (T, N).
    """
    (size, columns), flat, blocks = matrix.shape, matrix.reshape(-1), _token_groups(starts, matrix.shape[1])
    turned = np.empty(blocks[:, 2].sum() * columns, np.float32)
    found = np.empty(ROWS * blocks[:, 2].max(), np.float32)
    at = 0
    for k in range(len(blocks)):
        first, count, width = blocks[k, 0], blocks[k, 1], blocks[k, 2]
        transpose_tokens(x, tokens, first, count, width, turned[at : at + width * columns])
        at += width * columns
    # Of a smaller type some rows are made floats, once for all that is done with them.
    widen = multiply and matrix.itemsize < 4
    tokens_wide = np.empty((len(x), columns) if widen else (1, 1), np.float32)
    held = np.empty((ROWS, columns) if widen else (1, 1), np.float32)
    sums = np.empty((len(x), ROWS) if widen else (1, 1), np.float32)
    if widen:
        copy_as_float32(x, tokens_wide)
    for b in range(begin, end, ROWS):
        e = min(b + ROWS, end)
        if widen:
            copy_as_float32(matrix[b:e], held)
            dense_products(tokens_wide, held, 0, e - b, sums)
            take_block(blocks, turned, tokens, table, size, held.reshape(-1), b, columns, b, e, found, sums, b)
            for t in range(len(x)):
                row, values = y[t, b:e], sums[t]
                for r in range(e - b):
                    row[r] = round_to_type(values[r], row[r])
        else:
            if multiply:
                dense_products(x, matrix, b, e, y)
            take_block(blocks, turned, tokens, table, size, flat, 0, columns, b, e, found, y, 0)


LOOPS = sys.modules[__name__]
"""This module, under a name that can be imported from it."""
