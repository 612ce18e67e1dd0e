"""What cutting units saves: parameters, operations per token, and tokens per second measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from freemoe.evals.speed import wait_for
from freemoe.models.weights import find_weights

PREFILL = 512
_DECODED, _TURNS = 24, 5


def linear_operations(model: Any) -> int:
    """Multiplications and additions that a token costs in the linears of the decoder and the head."""
    visited = int(getattr(model.config.get_text_config(), "num_experts_per_tok", 1))
    inside = sum(w.size if not w.is_fused else w.size * visited // w.num_experts for w in find_weights(model))
    head = model.get_output_embeddings()
    return 2 * (inside + (head.weight.numel() if head is not None else 0))


@torch.no_grad()
def compare_cost(model: Any, small: Any, *, prefill: int = PREFILL, turns: int = _TURNS) -> dict[str, Any]:
    """Compare two models; every value is a pair, the first model's and the second's.

    Speeds are medians over turns in which the two follow each other, so that a busy machine slows both.

    Returns:
        ``parameters``, ``bytes``, ``operations`` per token, ``prefill`` and ``decode`` in tokens per second, and
        ``prefill_tokens``, the length of the prompt.
    """
    pair = (model, small)
    length = min(prefill, int(getattr(model.config.get_text_config(), "max_position_embeddings", prefill)) - _DECODED)
    ids = torch.arange(length, device=model.device)[None] % model.get_input_embeddings().num_embeddings

    def make_prefill(which: Any) -> Callable[[], None]:
        return lambda: which(input_ids=ids, use_cache=False, logits_to_keep=1)

    def make_decode(which: Any) -> Callable[[], None]:
        def decode_tokens() -> None:
            out = which(input_ids=ids[:, :32], use_cache=True, logits_to_keep=1)
            for _ in range(_DECODED):
                out = which(input_ids=ids[:, :1], past_key_values=out.past_key_values, use_cache=True)

        return decode_tokens

    return {
        "parameters": [sum(p.numel() for p in m.parameters()) for m in pair],
        "bytes": [sum(p.numel() * p.element_size() for p in m.parameters()) for m in pair],
        "operations": [linear_operations(m) for m in pair],
        "prefill": [length / s for s in _median_seconds([make_prefill(m) for m in pair], turns, model.device)],
        "decode": [_DECODED / s for s in _median_seconds([make_decode(m) for m in pair], turns, model.device)],
        "prefill_tokens": length,
    }


def _median_seconds(works: list[Callable[[], None]], turns: int, device: torch.device) -> list[float]:
    """Median seconds of each, one after the other, turn by turn; the first turn warms up."""
    seen: list[list[float]] = [[] for _ in works]
    for turn in range(turns + 1):
        for work, times in zip(works, seen, strict=True):
            wait_for(device)
            began = time.perf_counter()
            work()
            wait_for(device)
            if turn:
                times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in seen]
