"""Which token comes next, and how likely it was. Shapes: B rows, V tokens of the vocabulary."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.serve.engine.requests import Ask


class Chooser:
    """Draws the tokens of one answer; what it draws depends on its prompt, seed and number alone, not on its neighbours."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._written: Counter[int] = Counter()
        sampling = ask.sampling
        self._chances = () if sampling.is_greedy else sampling.chances(ask.prompt, ask.choice, ask.max_tokens)
        self.is_plain = sampling.is_greedy and not ask.presence and not ask.frequency and ask.repetition == 1

    def pick(self, logits: Tensor, step: int) -> int:
        """The token after ``step`` others, from its logits ``(V,)``."""
        ask = self._ask
        logits = logits.float()
        if ask.repetition != 1:
            ids = torch.tensor([*{*ask.prompt, *self._written}], device=logits.device)
            scores = logits[ids]
            scores = torch.where(scores < 0, scores * ask.repetition, scores / ask.repetition)
            logits = logits.index_copy(0, ids, scores)
        if self._written and (ask.presence or ask.frequency):
            ids = torch.tensor(list(self._written), device=logits.device)
            counts = torch.tensor(list(self._written.values()), device=logits.device, dtype=logits.dtype)
            logits = logits.index_add(0, ids, -(ask.presence + ask.frequency * counts))
        if ask.top_k and not ask.sampling.is_greedy:
            kept = logits.topk(min(ask.top_k, len(logits)))
            logits = torch.full_like(logits, -torch.inf).scatter(0, kept.indices, kept.values)
        if ask.min_p and not ask.sampling.is_greedy:
            least = logits.max() + ask.sampling.temperature * math.log(ask.min_p)
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = torch.tensor([] if ask.sampling.is_greedy else [self._chances[step]], dtype=torch.float64)
        token = int(ask.sampling.pick(logits[None], chances)[0])
        self._written[token] += 1
        return token


def likelihoods(logits: Tensor, tokens: Tensor, top: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Log-probability of each token, and the likeliest ones with theirs.

    Args:
        logits: ``(B, V)`` of any type; the softmax is taken in fp32.
        tokens: ``(B,)``.
        top: How many of the likeliest.
    """
    scores = logits.float().log_softmax(-1)
    own = scores.gather(1, tokens.to(scores.device)[:, None])[:, 0].tolist()
    if not top:
        return [(value, ()) for value in own]
    best = scores.topk(min(top, scores.shape[1]), dim=-1)
    named = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(value, tuple(zip(ids, values, strict=True))) for value, (ids, values) in zip(own, named, strict=True)]


def broken(logits: Tensor) -> NumericError:
    """The error of a sequence whose logits are no numbers."""
    return NumericError(
        f"{int(logits.isnan().sum())} of {logits.numel():,} logits of the next token are NaN. The model or its dtype is broken for "
        "this prompt; other requests are not touched. Try --dtype float32, another expert, or another prompt."
    )
