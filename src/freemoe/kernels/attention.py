"""Causal attention of queries and keys that are narrower than the values, on a CPU.

Fused attention wants one width for all three, so that narrow queries and keys have to be filled up with zeros, and what
was pruned is multiplied after all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 128
"""Queries whose scores are held at once."""

LEAST = 512
"""Tokens from which on this is faster than filling up."""


def narrow_applies(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether ``narrow_causal`` can be used and is worth it; that nothing is masked beside the future is for the caller."""
    narrow = queries.shape[-1] < values.shape[-1] and queries.shape[2] == keys.shape[2] >= LEAST
    return narrow and queries.device.type == "cpu" and queries.dtype == torch.float32


def narrow_causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """softmax(scale * Q K^T, causal) V, block of queries by block of queries. No gradients.

    Args:
        queries: (B, heads, T, width).
        keys: (B, kv heads, T, width).
        values: (B, kv heads, T, value width).
        scale: Of the scores.

    Returns:
        (B, T, heads, value width).
    """
    batch, heads, tokens, _ = queries.shape
    group = heads // keys.shape[1]
    output = queries.new_empty(batch, tokens, heads, values.shape[-1])
    held = queries.new_empty(min(BLOCK, tokens) * tokens)
    # A head's rows lie far apart in the output (and often in what comes in), often by a power of two, where products
    # are slow to read and to write: they are copied.
    summed = queries.new_empty(min(BLOCK, tokens), values.shape[-1])
    future = torch.full((BLOCK, BLOCK), -math.inf, dtype=queries.dtype).triu(1)
    for row in range(batch):
        for head in range(heads):
            q = queries[row, head] * scale
            k, v = keys[row, head // group].contiguous().T, values[row, head // group].contiguous()
            for begin in range(0, tokens, BLOCK):
                end = min(begin + BLOCK, tokens)
                scores = held[: (end - begin) * end].view(end - begin, end)
                torch.mm(q[begin:end], k[:, :end], out=scores)
                scores[:, begin:end] += future[: end - begin, : end - begin]
                torch.softmax(scores, dim=-1, out=scores)
                torch.mm(scores, v[:end], out=summed[: end - begin])
                output[row, begin:end, head] = summed[: end - begin]
    return output
