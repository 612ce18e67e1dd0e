"""The loops of `rows`, compiled by numba at their first call. Import it through `rows`, which knows what to do without.

Several rows, or several tokens, at a time: their products are independent, and so many are what one core needs to use
its arithmetic and its memory. Weights are float32, or bfloat16 seen as integers of 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    from numba import njit, types
    from numba.extending import overload
except ImportError as error:
    raise ImportError("numba is not installed") from error


def _jit(function: Callable[..., Any]) -> Any:
    settings: dict[str, Any] = {"fastmath": True, "nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **settings)(function)
    except RuntimeError:  # no folder in which compiled code could be kept
        return njit(**settings)(function)


def _number(weight: Any) -> Any:
    """A weight as float32."""
    raise NotImplementedError(f"{type(weight)} is only known to compiled code")


@overload(_number, inline="always")
def _typed_number(weight: Any) -> Any:
    if isinstance(weight, types.Float):
        return lambda weight: weight
    # The bits of a bfloat16 are the upper half of those of a float32.
    return lambda weight: np.uint32(np.uint32(weight) << np.uint32(16)).view(np.float32)


@_jit
def act(value, kind):
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


@_jit
def dots(x, matrix, r0, r1, r2, r3):
    """Four rows of a matrix times x."""
    a = b = c = d = np.float32(0)
    for i in range(len(x)):
        v = x[i]
        a += v * _number(matrix[r0, i])
        b += v * _number(matrix[r1, i])
        c += v * _number(matrix[r2, i])
        d += v * _number(matrix[r3, i])
    return a, b, c, d


@_jit
def dot(x, matrix, row):
    """One row of a matrix times x."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * _number(matrix[row, i])
    return total


@_jit
def add_rows(matrix, r0, r1, r2, r3, a, b, c, d, out):
    """Add four weighted rows to out."""
    for i in range(len(out)):
        out[i] += (a * _number(matrix[r0, i]) + b * _number(matrix[r1, i])) + (
            c * _number(matrix[r2, i]) + d * _number(matrix[r3, i])
        )


@_jit
def add_row(matrix, row, weight, out):
    """Add a weighted row to out."""
    for i in range(len(out)):
        out[i] += weight * _number(matrix[row, i])


@_jit
def gated(x, gate, up, bias, down, rows, kind, out):
    """Add to out: sum over rows of act(gate x) * (up x) * down; bias (2, u), or (2, 0) for none."""
    none = bias.shape[1] == 0
    whole = len(rows) // 4 * 4
    h = np.empty(4, np.float32)
    for j in range(0, whole, 4):
        r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
        g = dots(x, gate, r0, r1, r2, r3)
        u = dots(x, up, r0, r1, r2, r3)
        for n in range(4):
            row = rows[j + n]
            if none:
                h[n] = act(g[n], kind) * u[n]
            else:
                h[n] = act(g[n] + bias[0, row], kind) * (u[n] + bias[1, row])
        add_rows(down, r0, r1, r2, r3, h[0], h[1], h[2], h[3], out)
    for j in range(whole, len(rows)):
        row = rows[j]
        a, b = dot(x, gate, row), dot(x, up, row)
        if not none:
            a += bias[0, row]
            b += bias[1, row]
        add_row(down, row, act(a, kind) * b, out)


@_jit
def plain(x, up, bias, down, rows, kind, out):
    """Add to out: sum over rows of act(up x) * down; bias (1, u), or (1, 0) for none."""
    none = bias.shape[1] == 0
    whole = len(rows) // 4 * 4
    h = np.empty(4, np.float32)
    for j in range(0, whole, 4):
        r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
        u = dots(x, up, r0, r1, r2, r3)
        for n in range(4):
            h[n] = act(u[n] if none else u[n] + bias[0, rows[j + n]], kind)
        add_rows(down, r0, r1, r2, r3, h[0], h[1], h[2], h[3], out)
    for j in range(whole, len(rows)):
        row = rows[j]
        a = dot(x, up, row)
        add_row(down, row, act(a if none else a + bias[0, row], kind), out)


@_jit
def times(x, matrix, bias, rows, out):
    """Set out[rows] = matrix[rows] x + bias[rows]; bias (n,), or (0,) for none."""
    whole = len(rows) // 4 * 4
    for j in range(0, whole, 4):
        found = dots(x, matrix, rows[j], rows[j + 1], rows[j + 2], rows[j + 3])
        for n in range(4):
            out[rows[j + n]] = found[n]
    for j in range(whole, len(rows)):
        out[rows[j]] = dot(x, matrix, rows[j])
    if len(bias):
        for row in rows:
            out[row] += bias[row]


@_jit
def total(weights, matrix, rows, out):
    """Add to out: weights[rows] matrix[rows]."""
    whole = len(rows) // 4 * 4
    for j in range(0, whole, 4):
        r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
        add_rows(matrix, r0, r1, r2, r3, weights[r0], weights[r1], weights[r2], weights[r3], out)
    for j in range(whole, len(rows)):
        add_row(matrix, rows[j], weights[rows[j]], out)


@_jit
def tile4(x, t0, t1, t2, t3, first, second, a, b):
    """Row a of one matrix and row b of another times four tokens."""
    p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = np.float32(0)
    for i in range(x.shape[1]):
        f, s = _number(first[a, i]), _number(second[b, i])
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


@_jit
def tile1(x, token, first, second, a, b):
    """Row a of one matrix and row b of another times one token."""
    p = q = np.float32(0)
    for i in range(x.shape[1]):
        v = x[token, i]
        p += _number(first[a, i]) * v
        q += _number(second[b, i]) * v
    return p, q


@_jit
def row_products(x, tokens, count, first, second, a, b, p, q):
    """Set p[t] = row a of one matrix times x[t], q[t] = row b of another, for the first ``count`` tokens of a list."""
    whole = count // 4 * 4
    for j in range(0, whole, 4):
        t0, t1, t2, t3 = tokens[j], tokens[j + 1], tokens[j + 2], tokens[j + 3]
        p[t0], p[t1], p[t2], p[t3], q[t0], q[t1], q[t2], q[t3] = tile4(x, t0, t1, t2, t3, first, second, a, b)
    for j in range(whole, count):
        p[tokens[j]], q[tokens[j]] = tile1(x, tokens[j], first, second, a, b)


@_jit
def add_rows_to_tokens(matrix, row, rows, weights, tokens, count, out):
    """Add to out[t]: sum over k < 4 of weights[k, t] * matrix[row + k], for the first ``count`` tokens of a list."""
    # Rows beyond the last one have weights of zero.
    r1, r2, r3 = min(row + 1, rows - 1), min(row + 2, rows - 1), min(row + 3, rows - 1)
    for begin in range(0, out.shape[1], 512):
        end = min(begin + 512, out.shape[1])
        for j in range(count):
            t = tokens[j]
            a, b, c, d = weights[0, t], weights[1, t], weights[2, t], weights[3, t]
            for i in range(begin, end):
                out[t, i] += (a * _number(matrix[row, i]) + b * _number(matrix[r1, i])) + (
                    c * _number(matrix[r2, i]) + d * _number(matrix[r3, i])
                )


@_jit
def few(x, expert, mask, first, second, bias, down, begin, end, kind, out):
    """Add to out[t]: the MLP of t's expert, over the neurons [begin, end); ``mask`` (N, u) says whose they are.

    ``second`` is the up projection beside the gate ``first``, or the same matrix where there is but one.
    """
    gated, biased, tokens = bias.shape[0] == 2, bias.shape[1] > 0, len(x)
    own, some = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    p, q = np.empty(tokens, np.float32), np.empty(tokens, np.float32)
    h = np.zeros((4, tokens), np.float32)
    for row in range(begin, end, 4):
        h[:] = 0
        for k in range(min(4, end - row)):
            neuron, count = row + k, 0
            for t in range(tokens):
                if mask[expert[t], neuron]:
                    own[count] = t
                    count += 1
            row_products(x, own, count, first, second, neuron, neuron, p, q)
            for j in range(count):
                t = own[j]
                inner = act(p[t] + bias[0, neuron] if biased else p[t], kind)
                if gated:
                    inner *= q[t] + bias[1, neuron] if biased else q[t]
                h[k, t] = inner
        count = 0
        for t in range(tokens):
            if h[0, t] != 0 or h[1, t] != 0 or h[2, t] != 0 or h[3, t] != 0:
                some[count] = t
                count += 1
        add_rows_to_tokens(down, row, down.shape[0], h, some, count, out)
