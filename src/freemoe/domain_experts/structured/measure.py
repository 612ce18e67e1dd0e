"""What cutting units saves: parameters, operations per token, and tokens per second measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from freemoe.evals.speed import in_turns, wait_for
from freemoe.models.weights import find_weights

_PREFILL, _DECODED, _TURNS = 512, 24, 5


def linear_operations(model: Any) -> int:
    """Multiplications and additions that a token costs in the linears of the decoder and the head."""
    visited = int(getattr(model.config.get_text_config(), "num_experts_per_tok", 1))
    inside = sum(w.size if not w.is_fused else w.size * visited // w.num_experts for w in find_weights(model))
    head = model.get_output_embeddings()
    return 2 * (inside + (head.weight.numel() if head is not None else 0))


@torch.no_grad()
def compare_cost(model: Any, small: Any) -> dict[str, Any]:
    """Compare two models; every value is a pair, the first model's and the second's.

    Speeds are medians over turns in which the two follow each other, so that a busy machine slows both.

    Returns:
        ``parameters``, ``bytes``, ``operations`` per token, ``prefill`` and ``decode`` in tokens per second, and
        ``prefill_tokens``, the length of the prompt.
    """
    pair = (model, small)
    length = min(_PREFILL, int(getattr(model.config.get_text_config(), "max_position_embeddings", _PREFILL)) - _DECODED)
    ids = torch.arange(length, device=model.device)[None] % model.get_input_embeddings().num_embeddings

    def prefill(which: Any) -> None:
        which(input_ids=ids, use_cache=False, logits_to_keep=1)

    def decode(which: Any) -> None:
        out = which(input_ids=ids[:, :32], use_cache=True, logits_to_keep=1)
        for _ in range(_DECODED):
            out = which(input_ids=ids[:, :1], past_key_values=out.past_key_values, use_cache=True)

    return {
        "parameters": [sum(p.numel() for p in m.parameters()) for m in pair],
        "bytes": [sum(p.numel() * p.element_size() for p in m.parameters()) for m in pair],
        "operations": [linear_operations(m) for m in pair],
        "prefill": [length / s for s in _median_seconds(prefill, model, small)],
        "decode": [_DECODED / s for s in _median_seconds(decode, model, small)],
        "prefill_tokens": length,
    }


def _median_seconds(work: Callable[[Any], None], model: Any, small: Any) -> list[float]:
    """Median seconds of the work on each of two models."""

    def time_once(which: Any) -> float:
        wait_for(model.device)
        began = time.perf_counter()
        work(which)
        wait_for(model.device)
        return time.perf_counter() - began

    times = in_turns({"model": partial(time_once, model), "small": partial(time_once, small)}, _TURNS)
    return [statistics.median(seconds) for seconds in times.values()]
