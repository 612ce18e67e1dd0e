"""Which token comes next, and how likely it was. Shapes: B rows, V tokens of the vocabulary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.evals.engine.sampling import SamplingConfig, widest_float
from freemoe.models.mixed.rows import rows_by_key
from freemoe.serve.engine.requests import SequenceRequest


class SamplingRule(NamedTuple):
    """What of a request says how a token is drawn from its logits; see `SequenceRequest`. Rows that share it are drawn together."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float

    def sample_tokens(self, logits: Tensor, chances: Tensor) -> Tensor:
        """Choose a token per row, as `SamplingConfig.sample_tokens` does."""
        if not self.temperature:
            return logits.argmax(-1)
        logits = logits.float()
        if self.top_k:
            kept = logits.topk(min(self.top_k, logits.shape[-1]))
            logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
        if self.min_p:
            least = logits.amax(-1, keepdim=True) + self.temperature * math.log(self.min_p)
            logits = logits.masked_fill(logits < least, -torch.inf)
        return SamplingConfig(temperature=self.temperature, top_p=self.top_p).sample_tokens(logits, chances)


class TokenSampler:
    """Draws the tokens of one answer; what it draws depends on its prompt, seed and number alone, not on its neighbours."""

    def __init__(self, ask: SequenceRequest) -> None:
        sampling, self._ask = ask.sampling, ask
        self.rule = SamplingRule(sampling.temperature, sampling.top_p, ask.top_k, ask.min_p)
        self.penalises = bool(ask.presence or ask.frequency or ask.repetition != 1)
        self._chances = () if sampling.is_greedy else sampling.random_numbers(ask.prompt, ask.choice, ask.max_tokens)
        self._step, self._written, self._read = 0, Counter[int](), dict.fromkeys(ask.prompt)

    @property
    def next_random_number(self) -> float:
        """Of the next token; 0 where nothing is drawn."""
        return self._chances[self._step] if len(self._chances) else 0.0

    def repetition_penalties(self) -> tuple[Tensor, Tensor]:
        """Tokens whose logits are divided (below zero: multiplied), and by how much: ``(n,)`` each."""
        ids = list({**self._read, **self._written}) if self._ask.repetition != 1 else []
        return torch.tensor(ids, dtype=torch.long), torch.full((len(ids),), self._ask.repetition, dtype=torch.float32)

    def additive_penalties(self) -> tuple[Tensor, Tensor]:
        """Tokens to whose logits something is added, and how much: ``(n,)`` each."""
        counts = torch.tensor(list(self._written.values()), dtype=torch.float32)
        added = -(self._ask.presence + self._ask.frequency * counts)
        return torch.tensor(list(self._written), dtype=torch.long), added

    def accept_token(self, token: int) -> None:
        """Count a token that was chosen, for the penalties of the next."""
        self._step += 1
        self._written[token] += 1


def sample_batch(choosers: Sequence[TokenSampler], logits: Tensor) -> list[int]:
    """One token for each row; the host waits as often for many as for one.

    Logits are ``(B, V)``, no NaN among them.
    """
    logits = _apply_penalties(choosers, logits)
    groups = rows_by_key([chooser.rule for chooser in choosers])
    order = [row for rows in groups.values() for row in rows]
    chances = torch.tensor([choosers[row].next_random_number for row in order], dtype=widest_float(logits.device))
    if any(rule.temperature for rule in groups):
        chances = chances.to(logits.device)
    parts = zip(groups.items(), chances.split([len(rows) for rows in groups.values()]), strict=True)
    tokens = torch.cat([rule.sample_tokens(_select_rows(logits, rows), own) for (rule, rows), own in parts]).tolist()
    found = dict(zip(order, tokens, strict=True))
    for row, chooser in enumerate(choosers):
        chooser.accept_token(found[row])
    return [found[row] for row in range(len(choosers))]


def _select_rows(table: Tensor, rows: list[int]) -> Tensor:
    """These rows, without sending their numbers to the device."""
    return table if len(rows) == len(table) else torch.stack([table[row] for row in rows])


def _apply_penalties(choosers: Sequence[TokenSampler], logits: Tensor) -> Tensor:
    """The logits ``(B, V)`` with every row's penalties."""
    size, penalising = logits.shape[-1], [(row, c) for row, c in enumerate(choosers) if c.penalises]
    if not penalising:
        return logits
    parts = [(row, c.repetition_penalties()) for row, c in penalising] + [
        (row, c.additive_penalties()) for row, c in penalising
    ]
    ends = [sum(len(ids) for _, (ids, _) in half) for half in (parts[: len(penalising)], parts[len(penalising) :])]
    places = torch.cat([row * size + ids for row, (ids, _) in parts]).to(logits.device).split(ends)
    numbers = torch.cat([by for _, (_, by) in parts]).to(logits.device).split(ends)
    flat = logits.float().reshape(-1)
    scores = flat[places[0]]
    scores = torch.where(scores < 0, scores * numbers[0], scores / numbers[0])
    return flat.index_copy(0, places[0], scores).index_add(0, places[1], numbers[1]).view(logits.shape)


def gather_logprobs(
    logits: Tensor, tokens: Sequence[int], tops: Sequence[int | None]
) -> list[tuple[float | None, tuple[tuple[int, float], ...]]]:
    """Log-probability of each token, and the likeliest ones with theirs; the host waits as often for many as for one.

    Logits are ``(B, V)`` of any type; the softmax is taken in fp32. ``tops``: how many of the likeliest, for each row; None
    for no log-probability at all.
    """
    wanted = [row for row, top in enumerate(tops) if top is not None]
    found: list[tuple[float | None, tuple[tuple[int, float], ...]]] = [(None, ())] * len(tops)
    if not wanted:
        return found
    scores = _select_rows(logits, wanted).float().log_softmax(-1)
    own = scores.gather(1, torch.tensor([tokens[row] for row in wanted]).to(scores.device)[:, None])
    groups = rows_by_key([min(tops[row] or 0, scores.shape[1]) for row in wanted])
    best = [_select_rows(scores, rows).topk(top) for top, rows in groups.items()]
    values = torch.cat([part.flatten() for part in (own, *(b.values for b in best))]).tolist()
    ids, others = iter(torch.cat([b.indices.flatten() for b in best]).tolist()), iter(values[len(wanted) :])
    for top, rows in groups.items():
        for row in rows:
            found[wanted[row]] = values[row], tuple(zip(islice(ids, top), islice(others, top), strict=True))
    return found


def nan_error(logits: Tensor) -> NumericError:
    """The error of a sequence whose logits are no numbers."""
    return NumericError(
        f"{int(logits.isnan().sum())} of {logits.numel():,} logits of the next token are NaN. The model or its dtype is broken for "
        "this prompt; other requests are not touched. Try --dtype float32, another expert, or another prompt."
    )
