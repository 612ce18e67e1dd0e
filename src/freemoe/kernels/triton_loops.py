"""The kernels of `triton_experts`; import them through it, which knows what to do without Triton.

Names of sizes: T tokens, C columns of the result and K summed numbers of a block.
"""

# Compile-time constants of a kernel are written in capitals.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("triton is not installed") from error


def jit(kernel: Callable[..., Any]) -> Any:
    """Have Triton compile a kernel at its first launch."""
    return triton.jit(kernel)


@jit
def apply_activation(value, KIND: tl.constexpr):
    """The activation of a number in `rows.ACTIVATIONS`, of float32."""
    if KIND == 0:
        result = value * tl.sigmoid(value)
    elif KIND == 1:
        result = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    elif KIND == 2:
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        result = tl.maximum(value, 0.0)
    return result


@jit
def multiply_up(
    x, order, owner, begins, ends, index, widths, weight, bias, hidden, d, neurons, widest,
    PARTS: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    UPCAST: tl.constexpr, T: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Set hidden[place, n] = act(gate row of neuron n . x) * (up row . x), for a block of tokens and of an expert's neurons."""
    block = tl.program_id(0)
    expert = tl.load(owner + block)
    if expert >= 0:
        width = tl.load(widths + expert)
        n = tl.program_id(1) * C + tl.arange(0, C)
        if tl.program_id(1) * C < width:
            place = tl.load(begins + block) + tl.arange(0, T)
            alive = place < tl.load(ends + block)
            token = tl.load(order + place, mask=alive, other=0).to(tl.int64)
            own = n < width
            row = tl.load(index + expert * widest + n, mask=own, other=0).to(tl.int64)
            gate = tl.zeros((T, C), dtype=tl.float32)
            other = tl.zeros((T, C), dtype=tl.float32)
            for start in range(0, d, K):
                k = start + tl.arange(0, K)
                a = tl.load(x + token[:, None] * d + k[None, :], mask=alive[:, None] & (k < d)[None, :], other=0.0)
                at = row[None, :] * d + k[:, None]
                inside = own[None, :] & (k < d)[:, None]
                b = tl.load(weight + at, mask=inside, other=0.0)
                if UPCAST:
                    a, b = a.to(tl.float32), b.to(tl.float32)
                gate = tl.dot(a, b, gate, input_precision="ieee")
                if PARTS == 2:
                    c = tl.load(weight + neurons.to(tl.int64) * d + at, mask=inside, other=0.0)
                    if UPCAST:
                        c = c.to(tl.float32)
                    other = tl.dot(a, c, other, input_precision="ieee")
            if BIAS:
                gate += tl.load(bias + row, mask=own, other=0.0).to(tl.float32)[None, :]
            result = apply_activation(gate, KIND)
            if PARTS == 2:
                if BIAS:
                    other += tl.load(bias + neurons + row, mask=own, other=0.0).to(tl.float32)[None, :]
                result = result * other
            to = hidden + place.to(tl.int64)[:, None] * widest + n[None, :]
            tl.store(to, result.to(hidden.dtype.element_ty), mask=alive[:, None] & own[None, :])


@jit
def multiply_down(
    hidden, order, owner, begins, ends, index, widths, weight, bias, output, d, widest,
    BIAS: tl.constexpr, UPCAST: tl.constexpr, T: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Set output[token] = hidden[place] . rows of the expert's neurons, for a block of tokens and of columns."""
    block = tl.program_id(0)
    expert = tl.load(owner + block)
    if expert >= 0:
        width = tl.load(widths + expert)
        place = tl.load(begins + block) + tl.arange(0, T)
        alive = place < tl.load(ends + block)
        token = tl.load(order + place, mask=alive, other=0).to(tl.int64)
        column = tl.program_id(1) * C + tl.arange(0, C)
        total = tl.zeros((T, C), dtype=tl.float32)
        for start in range(0, width, K):
            n = start + tl.arange(0, K)
            own = n < width
            row = tl.load(index + expert * widest + n, mask=own, other=0).to(tl.int64)
            a = tl.load(
                hidden + place.to(tl.int64)[:, None] * widest + n[None, :],
                mask=alive[:, None] & own[None, :],
                other=0.0,
            )
            b = tl.load(
                weight + row[:, None] * d + column[None, :], mask=own[:, None] & (column < d)[None, :], other=0.0
            )
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision="ieee")
        if BIAS:
            total += tl.load(bias + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
        to = output + token[:, None] * d + column[None, :]
        tl.store(to, total.to(output.dtype.element_ty), mask=alive[:, None] & (column < d)[None, :])
