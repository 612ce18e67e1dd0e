"""The loops of `rows`, compiled by numba at their first call. Import it through `rows`, which knows what to do without.

Several rows, or several tokens, at a time: their products are independent, and so many are what one core needs to use
its arithmetic and its memory. Weights are float32, or bfloat16 seen as integers of 16 bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    from numba import njit, types
    from numba.extending import overload
except ImportError as error:
    raise ImportError("numba is not installed") from error


COLUMNS = 512
"""Columns of eight rows that a core's first cache holds beside a token's."""


def jit(function: Callable[..., Any]) -> Any:
    """Compile a loop, and keep what was compiled where that can be done."""
    settings: dict[str, Any] = {"fastmath": True, "nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **settings)(function)
    except RuntimeError:  # no folder in which compiled code could be kept
        return njit(**settings)(function)


def as_float32(weight):
    """A weight as float32, whatever 16-bit type it is stored in; only in compiled code."""
    raise NotImplementedError(f"{type(weight)} is only known to compiled code")


@overload(as_float32, inline="always")
def _typed_number(weight):
    if isinstance(weight, types.Float):
        return lambda weight: weight
    # The bits of a bfloat16 are the upper half of those of a float32.
    return lambda weight: np.uint32(np.uint32(weight) << np.uint32(16)).view(np.float32)


@jit
def apply_activation(value, kind):
    """The activation of a number in `rows.ACTIVATIONS`, of one float32."""
    one, half = np.float32(1), np.float32(0.5)
    if kind == 0:
        return value / (one + np.float32(math.exp(-value)))
    if kind == 1:
        inner = np.float32(0.7978845608028654) * (value + np.float32(0.044715) * value * value * value)
        return half * value * (one + np.float32(math.tanh(inner)))
    if kind == 2:
        return half * value * (one + np.float32(math.erf(value * np.float32(0.7071067811865476))))
    return max(value, np.float32(0))


@jit
def four_token_products(x, t0, t1, t2, t3, first, second, a, b):
    """Row a of one matrix and row b of another times four tokens."""
    p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = np.float32(0)
    for i in range(first.shape[1]):
        f, s = as_float32(first[a, i]), as_float32(second[b, i])
        v0, v1, v2, v3 = x[t0, i], x[t1, i], x[t2, i], x[t3, i]
        p0 += f * v0
        p1 += f * v1
        p2 += f * v2
        p3 += f * v3
        q0 += s * v0
        q1 += s * v1
        q2 += s * v2
        q3 += s * v3
    return p0, p1, p2, p3, q0, q1, q2, q3


@jit
def one_token_products(x, token, first, second, a, b):
    """Row a of one matrix and row b of another times one token."""
    p = q = np.float32(0)
    for i in range(first.shape[1]):
        v = x[token, i]
        p += as_float32(first[a, i]) * v
        q += as_float32(second[b, i]) * v
    return p, q


@jit
def eight_row_products(x, first, second, a, b, out):
    """Set out: four rows ``a`` of one matrix, then four rows ``b`` of another, times one token.

    Eight streams through memory at once, which is what one core needs to use the whole of it.
    """
    a0, a1, a2, a3 = first[a[0]], first[a[1]], first[a[2]], first[a[3]]
    b0, b1, b2, b3 = second[b[0]], second[b[1]], second[b[2]], second[b[3]]
    p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = np.float32(0)
    for i in range(first.shape[1]):
        v = x[i]
        p0 += v * as_float32(a0[i])
        p1 += v * as_float32(a1[i])
        p2 += v * as_float32(a2[i])
        p3 += v * as_float32(a3[i])
        q0 += v * as_float32(b0[i])
        q1 += v * as_float32(b1[i])
        q2 += v * as_float32(b2[i])
        q3 += v * as_float32(b3[i])
    out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7] = p0, p1, p2, p3, q0, q1, q2, q3


@jit
def row_products(x, tokens, count, first, second, a, b, p, q):
    """Set p[t] = row a of one matrix times x[t], q[t] = row b of another, for the first ``count`` tokens of a list."""
    for j in range(0, count, 4):
        if j == count - 1:
            p[tokens[j]], q[tokens[j]] = one_token_products(x, tokens[j], first, second, a, b)
        else:
            # A token computed twice costs less than two or three that are computed alone.
            t0, t1 = tokens[j], tokens[j + 1]
            t2, t3 = tokens[min(j + 2, count - 1)], tokens[min(j + 3, count - 1)]
            p[t0], p[t1], p[t2], p[t3], q[t0], q[t1], q[t2], q[t3] = four_token_products(
                x, t0, t1, t2, t3, first, second, a, b
            )


@jit
def _add_rows_to_one(matrix, rows, weights, out):
    """Add eight weighted rows to out (d,)."""
    m0, m1, m2, m3 = matrix[rows[0]], matrix[rows[1]], matrix[rows[2]], matrix[rows[3]]
    m4, m5, m6, m7 = matrix[rows[4]], matrix[rows[5]], matrix[rows[6]], matrix[rows[7]]
    a, b, c, d = weights[0], weights[1], weights[2], weights[3]
    e, f, g, h = weights[4], weights[5], weights[6], weights[7]
    for i in range(len(out)):
        first = (a * as_float32(m0[i]) + b * as_float32(m1[i])) + (c * as_float32(m2[i]) + d * as_float32(m3[i]))
        second = (e * as_float32(m4[i]) + f * as_float32(m5[i])) + (g * as_float32(m6[i]) + h * as_float32(m7[i]))
        out[i] += first + second


@jit
def add_rows(matrix, rows, weights, tokens, count, out):
    """Add to out[t]: eight rows weighted by weights[:, t], for the first ``count`` tokens of a list."""
    if count == 1:
        _add_rows_to_one(matrix, rows, weights[:, tokens[0]], out[tokens[0]])
        return
    held = np.empty((8, COLUMNS + 16), np.float32)
    for begin in range(0, out.shape[1], COLUMNS):
        size = min(COLUMNS, out.shape[1] - begin)
        # Rows that lie a power of two apart would push each other out of the cache: copied, they lie otherwise.
        for k in range(8):
            row, to = matrix[rows[k], begin : begin + size], held[k]
            for i in range(size):
                to[i] = as_float32(row[i])
        m0, m1, m2, m3, m4, m5, m6, m7 = held[0], held[1], held[2], held[3], held[4], held[5], held[6], held[7]
        for j in range(count):
            t = tokens[j]
            a, b, c, d = weights[0, t], weights[1, t], weights[2, t], weights[3, t]
            e, f, g, h = weights[4, t], weights[5, t], weights[6, t], weights[7, t]
            # Counting from zero: an index that might be negative is not vectorised.
            to = out[t, begin : begin + size]
            for i in range(size):
                total = to[i] + a * m0[i]
                total += b * m1[i]
                total += c * m2[i]
                total += d * m3[i]
                total += e * m4[i]
                total += f * m5[i]
                total += g * m6[i]
                to[i] = total + h * m7[i]


@jit
def one_expert(x, member, first, second, bias, down, begin, end, kind, out):
    """As ``experts`` for one token (1, d), whose expert's neurons ``member`` (u,) names."""
    gated, biased = bias.shape[0] == 2, bias.shape[1] > 0
    h, rows, found = np.zeros((8, 1), np.float32), np.zeros(8, np.int64), np.empty(8, np.float32)
    token, filled = np.zeros(1, np.int64), 0
    for neuron in range(begin, end):
        if member[neuron]:
            rows[filled] = neuron
            filled += 1
        if filled == 8 or (neuron == end - 1 and filled > 0):
            # What is left of a last group is neurons of the one before, and weighs nothing.
            for half in range(0, 8, 4):
                four = rows[half : half + 4]
                eight_row_products(x[0], first, second, four, four, found)
                for k in range(4):
                    inner = apply_activation(found[k] + bias[0, four[k]] if biased else found[k], kind)
                    if gated:
                        inner *= found[4 + k] + bias[1, four[k]] if biased else found[4 + k]
                    h[half + k, 0] = inner if half + k < filled else np.float32(0)
            add_rows(down, rows, h, token, 1, out)
            filled = 0


@jit
def experts(x, owner, mask, first, second, bias, down, begin, end, kind, out):
    """Add to out[t]: what the neurons [begin, end) that token t's expert has contribute; ``mask`` (N, u) says who has what.

    ``second`` is the up projection beside the gate ``first``, or the same matrix where there is but one; bias is
    (parts, u), or (parts, 0) for none.
    """
    gated, biased, tokens = bias.shape[0] == 2, bias.shape[1] > 0, len(x)
    own, some = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    p, q = np.empty(tokens, np.float32), np.empty(tokens, np.float32)
    h, rows, filled = np.zeros((8, tokens), np.float32), np.zeros(8, np.int64), 0
    for neuron in range(begin, end):
        count = 0
        for t in range(tokens):
            if mask[owner[t], neuron]:
                own[count] = t
                count += 1
        if count > 0:
            row_products(x, own, count, first, second, neuron, neuron, p, q)
            for j in range(count):
                t = own[j]
                inner = apply_activation(p[t] + bias[0, neuron] if biased else p[t], kind)
                if gated:
                    inner *= q[t] + bias[1, neuron] if biased else q[t]
                h[filled, t] = inner
            rows[filled] = neuron
            filled += 1
        # Eight wanted neurons go down together; where a last group is not full, the rest of it weighs nothing.
        if filled == 8 or (neuron == end - 1 and filled > 0):
            count = 0
            for t in range(tokens):
                used = False
                for k in range(filled):
                    used |= h[k, t] != 0
                if used:
                    some[count] = t
                    count += 1
            add_rows(down, rows, h, some, count, out)
            h[:] = 0
            filled = 0


@jit
def find_keeping_tokens(mask, dimension, tokens):
    """Write into ``tokens`` which tokens keep a dimension; returns how many."""
    count = 0
    for t in range(len(mask)):
        if mask[t, dimension]:
            tokens[count] = t
            count += 1
    return count


@jit
def _one_heads_times(x, mask, matrix, bias, begin, end, out):
    """``heads_times`` for one token: eight heads at a time."""
    head_dim = mask.shape[1]
    rows, found = np.zeros(8, np.int64), np.empty(8, np.float32)
    for head in range(0, matrix.shape[0], 8 * head_dim):
        for dimension in range(begin, end):
            if mask[0, dimension]:
                for k in range(8):
                    row = head + k * head_dim + dimension
                    rows[k] = row if row < matrix.shape[0] else head + dimension
                eight_row_products(x[0], matrix, matrix, rows[:4], rows[4:], found)
                for k in range(8):
                    out[0, rows[k]] = found[k] + bias[rows[k]] if len(bias) else found[k]


@jit
def heads_times(x, mask, matrix, bias, begin, end, out):
    """Set out[t, row] = matrix[row] x[t] + bias[row] for the dimensions [begin, end) of every head that mask[t] keeps.

    A row is a dimension of a head; mask (T, head_dim); bias (rows,), or (0,) for none.
    """
    tokens, head_dim = mask.shape
    own = np.empty(tokens, np.int64)
    p, q = np.empty(tokens, np.float32), np.empty(tokens, np.float32)
    if tokens == 1:
        _one_heads_times(x, mask, matrix, bias, begin, end, out)
        return
    # Two heads at a time, which the same tokens want; dimensions inside, so that memory is read in order.
    for head in range(0, matrix.shape[0], 2 * head_dim):
        for dimension in range(begin, end):
            count = find_keeping_tokens(mask, dimension, own)
            row = head + dimension
            other = row + head_dim if row + head_dim < matrix.shape[0] else row
            row_products(x, own, count, matrix, matrix, row, other, p, q)
            for j in range(count):
                t = own[j]
                out[t, other] = q[t] + bias[other] if len(bias) else q[t]
                out[t, row] = p[t] + bias[row] if len(bias) else p[t]


@jit
def heads_sum(weights, mask, matrix, begin, end, out):
    """Add to out[t]: weights[t, row] * matrix[row] over the dimensions [begin, end) of every head that mask[t] keeps."""
    tokens, head_dim = mask.shape
    own = np.empty(tokens, np.int64)
    h, rows = np.zeros((8, tokens), np.float32), np.zeros(8, np.int64)
    for head in range(0, matrix.shape[0], 8 * head_dim):
        for dimension in range(begin, end):
            count = find_keeping_tokens(mask, dimension, own)
            for k in range(8):
                row = head + k * head_dim + dimension
                rows[k] = row if row < matrix.shape[0] else head + dimension
                for j in range(count):
                    h[k, own[j]] = weights[own[j], rows[k]] if row < matrix.shape[0] else np.float32(0)
            if count > 0:
                add_rows(matrix, rows, h, own, count, out)


LOOPS = sys.modules[__name__]
"""This module, under a name that can be imported from it."""
