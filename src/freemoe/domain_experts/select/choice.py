"""The guarded choice: a candidate replaces the base only where a test that counts the search shows a gain."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from freemoe.domain_experts.select.scores import ScoreTable
from freemoe.domain_experts.select.search import SEARCHES
from freemoe.evals.statistics import HEAVY_LOSS, holm, paired_test
from freemoe.models.mixed.rows import rows_by_key

MOST_MUCH_WORSE = 0.05
"""Share of ruined documents above which no mean gain is accepted."""


@dataclass(frozen=True)
class CandidateVerdict:
    """What one metric's winner showed on the selection split."""

    metric: str  # The metric that made the candidates
    candidate: str  # The winner
    # Mean paired gain on the documents that test it. A winner of a search was picked on these very documents, so that
    # its gain here is the larger for it; the p-value is not
    gain: float
    p: float  # One-sided p-value that the gain is above zero, whichever candidate the search had picked
    tested: int  # Number of those documents
    much_worse: float = 0.0  # Share of them that lost more than `HEAVY_LOSS`
    holm: float | None = None  # The p-value adjusted over all verdicts of the build; None until `adjust_verdicts`


def _shuffle_clusters(keys: Sequence[str], seed: int) -> list[list[int]]:
    """Document numbers of every content key, keys in random order."""
    order = list(rows_by_key(keys).values())
    random.Random(seed).shuffle(order)
    return order


def split_folds(keys: Sequence[str], count: int, seed: int) -> list[list[int]]:
    """Split document numbers into folds of like size; documents with the same content key stay together."""
    parts: list[list[int]] = [[] for _ in range(count)]
    for cluster in _shuffle_clusters(keys, seed):
        min(parts, key=len).extend(cluster)
    return [sorted(p) for p in parts if p]


def split_by_share(keys: Sequence[str], parts: Sequence[float], seed: int) -> list[list[int]]:
    """Split document numbers into parts of given shares; the last part takes the rest. Keys stay together.

    Where keys are few, every part that is to have documents gets one.
    """
    order = _shuffle_clusters(keys, seed)
    split: list[list[int]] = [[] for _ in range(len(parts) + 1)]
    bounds = [sum(parts[: i + 1]) * len(keys) for i in range(len(parts))]
    placed, part = 0, 0
    for left, cluster in zip(range(len(order), 0, -1), order, strict=True):
        while part < len(parts) and (
            (placed >= bounds[part] - 0.5 or left <= len(parts) - part) if split[part] else not parts[part]
        ):
            part += 1
        split[part].extend(cluster)
        placed += len(cluster)
    return [sorted(p) for p in split]


def judge_winner(
    table: ScoreTable, metric: str, candidates: Sequence[str], search: str, objective: str, seed: int
) -> CandidateVerdict:
    """Search on all reference documents, and test the winner on them against all that it was picked from.

    Where every candidate was scored on every document, the null distribution is that of the best of them all. A search that
    leaves some out early has no such scores: there the winner's own p-value is multiplied by the number of candidates. Either way the
    claim is the winner's, and is taken on the reported figure, whatever the objective of the search.
    """
    documents = range(len(table.split))
    winner = SEARCHES.get(search)(table, candidates, documents, objective, seed)
    keys, weights = table.content_keys, table.token_weights(documents)
    if search == "exhaustive":
        gains = np.array([table.paired_gains(c, documents) for c in candidates]).T
        p = paired_test(gains, keys, weights, picked=list(candidates).index(winner), seed=seed)
    else:
        p = min(1.0, len(candidates) * paired_test(table.paired_gains(winner, documents), keys, weights, seed=seed))
    return _make_verdict(table, metric, winner, documents, p)


def judge_fitted(table: ScoreTable, candidate: str, guard: Sequence[int], seed: int) -> CandidateVerdict:
    """Compare a fitted candidate with the base on documents that neither fitted nor stopped it."""
    keys = [table.content_keys[i] for i in guard]
    p = paired_test(table.paired_gains(candidate, guard), keys, table.token_weights(guard), seed=seed)
    return _make_verdict(table, candidate, candidate, guard, p)


def _make_verdict(
    table: ScoreTable, metric: str, candidate: str, documents: Sequence[int], p: float
) -> CandidateVerdict:
    gains = table.paired_gains(candidate, documents)
    much_worse = sum(gain < -HEAVY_LOSS for gain in gains) / len(gains)
    return CandidateVerdict(metric, candidate, table.mean_gain(candidate, documents), p, len(documents), much_worse)


def adjust_verdicts(verdicts: Sequence[Sequence[CandidateVerdict]]) -> list[list[CandidateVerdict]]:
    """Adjust the p-values of all verdicts of all subdomains together (Holm)."""
    flat = [v for group in verdicts for v in group]
    adjusted = iter(holm([v.p for v in flat]))
    return [[replace(v, holm=next(adjusted)) for v in group] for group in verdicts]


def accept_candidate(verdicts: Sequence[CandidateVerdict], alpha: float) -> CandidateVerdict | None:
    """The candidate that is proven best, or None: no reliable gain, the base stays.

    Gains of several metrics may be of different documents, so that the smallest adjusted p-value decides. A mean hides a few
    documents that are ruined: a candidate that ruins more than `MOST_MUCH_WORSE` of them is refused, whatever its mean.
    """
    proven = [
        v for v in verdicts if v.holm is not None and v.holm <= alpha and v.gain > 0 and v.much_worse <= MOST_MUCH_WORSE
    ]
    return min(proven, key=lambda v: (v.holm, -v.gain)) if proven else None


def required_documents(tests: int, alpha: float) -> int:
    """Different documents with which one of ``tests`` tests can pass at ``alpha``, whatever the others show."""
    return max(1, math.ceil(math.log2(tests / alpha) - 1e-9))
