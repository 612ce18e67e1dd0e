"""Whether a model's answers stay the same when beginnings are shared: what its layers allow, and a trial run."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import torch

from freemoe.compat.transformers import attention_of
from freemoe.evals.engine.likelihoods import score_requests, tensors_of
from freemoe.evals.engine.row_plan import Ids, TokenPair, plan

FORWARD_COST = {"cpu": 64, "accelerator": 1024}
"""Tokens that one more forward pass is worth: launching its kernels costs an accelerator more than running them."""

_TRIAL = 32
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_ROUGH = 0.25  # nats, for the dtypes whose rounding alone moves a log-likelihood by hundredths


def sliding_window(model: Any) -> int | None:
    """Tokens that the model's narrowest layer sees, or None where every layer sees all."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    found = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    return min((w for w in found if isinstance(w, int) and w > 0), default=None)


def masks_are_dense(model: Any) -> bool:
    """Whether the attention function takes any mask, as branches need; flash attention knows causal ones only."""
    return attention_of(model.config) in ("sdpa", "eager")


def sharing_problem(model: Any, ids: Ids, max_length: int) -> str | None:
    """Score a few made-up requests in both ways and compare.

    ``ids``: any text's tokens, of which the requests are made. Gives why sharing does not work on this model; None where it
    does.
    """
    if max_length < _TRIAL:
        return f"the context of {max_length} tokens is too short for it to be tried out"
    # Two contexts with a prefix in common and three answers each.
    text = (ids * _TRIAL)[:_TRIAL]
    contexts, answers = (text[:20], text[:14] + text[20:26]), (text[26:29], text[27:30], text[29:31])
    requests, window = [TokenPair(*pair) for pair in itertools.product(contexts, answers)], sliding_window(model)
    whole = plan(requests, 4096, share=False, branch=False)
    # With branches the requests have one prefix; without them each context is the prefix of its answers.
    kinds = [False, True] if masks_are_dense(model) else [False]
    ways = [plan(requests, 4096, branch=branch, window=window) for branch in kinds]
    expected, _ = score_requests(model, tensors_of(whole, model.device), len(requests))
    if any(math.isnan(v) for v in expected):
        return None  # the caller finds the same NaN and says what it means
    allowed = _TOLERANCE.get(model.dtype, _ROUGH)
    for groups in ways:
        try:
            found, _ = score_requests(model, tensors_of(groups, model.device), len(requests))
        except Exception as error:  # whatever a model's own code makes of a cache it was not written for
            return f"{type(model).__name__} cannot be run behind a shared prefix ({type(error).__name__}: {error})"
        # The median, because rounding may send single tokens to another expert of a mixture.
        apart = statistics.median(abs(a - b) for a, b in zip(expected, found, strict=True))
        if not apart <= allowed:
            return f"{type(model).__name__} answers differently behind a shared prefix (by {apart:.2g} nats)"
    return None
