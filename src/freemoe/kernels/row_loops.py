"""The loops of `rows`, compiled by numba at their first call. Import it through `rows`, which knows what to do without.

Four rows at a time: their products are independent, and so many streams are what one core needs to use the memory it
has. Weights are float32, or bfloat16 seen as integers of 16 bits.
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
    """out += sum over rows of act(gate x) * (up x) * down; bias (2, u), or (2, 0) for none."""
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
    """out += sum over rows of act(up x) * down; bias (1, u), or (1, 0) for none."""
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
    """out[rows] = matrix[rows] x + bias[rows]; bias (n,), or (0,) for none."""
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
    """out += weights[rows] matrix[rows]."""
    whole = len(rows) // 4 * 4
    for j in range(0, whole, 4):
        r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
        add_rows(matrix, r0, r1, r2, r3, weights[r0], weights[r1], weights[r2], weights[r3], out)
    for j in range(whole, len(rows)):
        add_row(matrix, rows[j], weights[rows[j]], out)
