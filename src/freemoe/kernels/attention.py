"""Causal attention of queries and keys that are narrower than the values, on a CPU.

Fused attention wants one width for all three, so that narrow queries and keys have to be filled up with zeros, and what
was pruned is multiplied after all.
"""

from __future__ import annotations

import itertools
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
    # As many heads as there are threads: each has a head to itself, and its scores in its own cache.
    together = min(heads, torch.get_num_threads())
    output = queries.new_empty(batch, tokens, heads, values.shape[-1])
    held = queries.new_empty(together * min(BLOCK, tokens) * tokens)
    future = torch.full((BLOCK, BLOCK), -math.inf, dtype=queries.dtype).triu(1)
    for row, first in itertools.product(range(batch), range(0, heads, together)):
        own = slice(first, min(first + together, heads))
        # A head's rows lie far apart in the output (and often in what comes in), often by a power of two, where products
        # are slow to read and to write: they are copied.
        kv = torch.arange(own.start, own.stop) // group
        q = (queries[row, own] * scale).contiguous()
        k, v = (states[row].index_select(0, kv) for states in (keys, values))
        summed = queries.new_empty(len(kv), tokens, values.shape[-1])
        for begin in range(0, tokens, BLOCK):
            end = min(begin + BLOCK, tokens)
            scores = held[: len(kv) * (end - begin) * end].view(len(kv), end - begin, end)
            torch.bmm(q[:, begin:end], k[:, :end].transpose(1, 2), out=scores)
            scores[:, :, begin:end] += future[: end - begin, : end - begin]
            torch.softmax(scores, dim=-1, out=scores)
            torch.bmm(scores, v[:, :end], out=summed[:, begin:end])
        output[row, :, own] = summed.transpose(0, 1)
    return output
