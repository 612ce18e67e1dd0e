"""The loops of `one_token`, compiled by numba at their first call. Import it through `one_token`.

One token meets every weight once, so that memory is all that counts: a matrix is read row by row, as it lies. Weights are
float32, or bfloat16 seen as integers of 16 bits; everything else is float32.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from freemoe.kernels.row_loops import apply_activation, as_float32, jit


@jit
def row_dot(x, row):
    """A row of weights times x."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * as_float32(row[i])
    return total


@jit
def times(x, matrix, begin, end, out):
    """Set out[r] = matrix[r] . x for r in [begin, end)."""
    for r in range(begin, end):
        out[r] = row_dot(x, matrix[r])


@jit
def apply_rms_norm(x, weight, eps, out):
    """Set out to x over its root mean square, times weight."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(len(x)) + eps))
    for i in range(len(x)):
        out[i] = x[i] * scale * as_float32(weight[i])


@jit
def _project_rows(x, matrix, bias, offset, begin, end, out):
    """``times`` for a matrix whose first row is the row ``offset`` of several that are counted on, with a bias or none."""
    for r in range(max(begin - offset, 0), min(end - offset, len(matrix))):
        out[offset + r] = row_dot(x, matrix[r])
        if len(bias):
            out[offset + r] += as_float32(bias[r])


@jit
def project(x, norm, eps, query, key, value, query_bias, key_bias, value_bias, begin, end, out):
    """Set out[begin:end]: queries, keys and values of the normed x, one behind the other."""
    held = np.empty(len(x), np.float32)
    apply_rms_norm(x, norm, eps, held)
    _project_rows(held, query, query_bias, 0, begin, end, out)
    _project_rows(held, key, key_bias, len(query), begin, end, out)
    _project_rows(held, value, value_bias, len(query) + len(key), begin, end, out)


@jit
def _norm_and_rotate(states, norm, eps, clip, cos, sin, head_dim):
    """Norm (of each head, of all, or none), clip and turn by the rotary embedding, in place."""
    if len(norm) == len(states):
        apply_rms_norm(states, norm, eps, states)
    half = len(cos) // 2
    for begin in range(0, len(states), head_dim):
        head = states[begin : begin + head_dim]
        if len(norm) == head_dim and len(norm) < len(states):
            apply_rms_norm(head, norm, eps, head)
        if clip > 0:
            for i in range(head_dim):
                head[i] = min(max(head[i], -clip), clip)
        for i in range(half):
            first, second = head[i], head[i + half]
            head[i] = first * cos[i] - second * sin[i]
            head[i + half] = second * cos[i + half] + first * sin[i + half]


@jit
def turn(query, key, value, query_norm, key_norm, query_eps, key_eps, clip, cos, sin, head_dim):
    """What becomes of queries, keys and values before they meet: norms, clipping, rotary embedding; in place."""
    _norm_and_rotate(query, query_norm, query_eps, clip, cos, sin, head_dim)
    _norm_and_rotate(key, key_norm, key_eps, clip, cos, sin, head_dim)
    if clip > 0:
        for i in range(len(value)):
            value[i] = min(max(value[i], -clip), clip)


@jit
def attend(query, keys, values, scale, begin, end, out):
    """Attention of the key heads [begin, end): query (heads, width), keys and values (key heads, T, width)."""
    group, tokens = len(query) // len(keys), keys.shape[1]
    scores = np.empty(tokens, np.float32)
    for head in range(begin * group, end * group):
        q, some, other, to = query[head], keys[head // group], values[head // group], out[head]
        largest = np.float32(-np.inf)
        for t in range(tokens):
            scores[t] = row_dot(q, some[t]) * scale
            largest = max(largest, scores[t])
        total = np.float32(0)
        for t in range(tokens):
            scores[t] = np.float32(math.exp(scores[t] - largest))
            total += scores[t]
        to[:] = 0
        for t in range(tokens):
            weight, row = scores[t] / total, other[t]
            for i in range(len(to)):
                to[i] += weight * as_float32(row[i])


@jit
def bent(x, up, down, up_bias, down_bias, factor, begin, end, out):
    """Add to out: factor * down(relu(up(x))), of the units [begin, end); the last bias comes with the first unit."""
    inner = np.empty(end - begin, np.float32)
    for unit in range(begin, end):
        value = row_dot(x, up[unit])
        if len(up_bias):
            value += as_float32(up_bias[unit])
        inner[unit - begin] = factor * max(value, np.float32(0))
    for i in range(len(down)):
        out[i] += row_dot(inner, down[i, begin:end])
        if begin == 0 and len(down_bias):
            out[i] += factor * as_float32(down_bias[i])


@jit
def choose_experts(x, router, top_k, active, normalise, renormalise, index, weights):
    """Set index and weights (active,): the heaviest of the ``top_k`` likeliest experts.

    Weights are shares of all experts, or of the ``top_k`` (``normalise``); ``renormalise``: those that run sum to
    what all ``top_k`` did.
    """
    shares = np.empty(len(router), np.float32)
    times(x, router, 0, len(router), shares)
    largest = shares.max()
    whole = np.float32(0)
    for e in range(len(shares)):
        shares[e] = np.float32(math.exp(shares[e] - largest))
        whole += shares[e]
    above = below = np.float32(0)
    for slot in range(top_k):
        best = 0
        for e in range(1, len(shares)):
            if shares[e] > shares[best]:
                best = e
        above += shares[best]
        if slot < active:
            index[slot], weights[slot] = best, shares[best]
            below += shares[best]
        shares[best] = np.float32(-1)
    scale = np.float32(1) / (above if normalise else whole)
    if renormalise:
        scale *= above / below
    for slot in range(active):
        weights[slot] *= scale


@jit
def settle(
    x, attended, bias, norm, eps, up, down, up_bias, down_bias, factor, before,
    router, top_k, active, normalise, renormalise, inner, index, weights,
):  # fmt: skip
    """Add the attention's output to x in place; set inner, what the experts see, and their index and weights."""
    for i in range(len(x)):
        x[i] += attended[i]
        if len(bias):
            x[i] += as_float32(bias[i])
    apply_rms_norm(x, norm, eps, inner)
    if before:
        shift = np.zeros(len(x), np.float32)
        bent(inner, up, down, up_bias, down_bias, factor, 0, len(up), shift)
        for i in range(len(x)):
            inner[i] += shift[i]
    choose_experts(inner, router, top_k, active, normalise, renormalise, index, weights)


@jit
def experts(x, index, weights, first, last, kind, begin, end, out):
    """Add to out: the weighted experts of one token, their neurons [begin, end) alone.

    first (N, 2f, d), gate above up; last (N, d, f). An index that is no expert's is left out.
    """
    width, inner = last.shape[2], np.empty(end - begin, np.float32)
    for slot in range(len(index)):
        expert = index[slot]
        if 0 <= expert < len(first):
            gate_up, down = first[expert], last[expert]
            for n in range(begin, end):
                gate, up = row_dot(x, gate_up[n]), row_dot(x, gate_up[width + n])
                inner[n - begin] = weights[slot] * apply_activation(gate, kind) * up
            for i in range(len(down)):
                out[i] += row_dot(inner, down[i, begin:end])


LOOPS = sys.modules[__name__]
"""This module, under a name that can be imported from it."""
