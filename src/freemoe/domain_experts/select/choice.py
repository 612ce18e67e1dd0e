"""The guarded choice: a candidate replaces the base only if it beats it on documents that did not choose it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from freemoe.domain_experts.select.scores import ScoreTable
from freemoe.domain_experts.select.search import Search
from freemoe.evals.statistics import holm, paired_test, smallest_p


@dataclass(frozen=True)
class Verdict:
    """What one metric's winner showed on documents that did not choose it.

    Attributes:
        metric: The metric that made the candidates.
        candidate: The winner over all documents that may choose.
        gain: Mean paired gain on the documents that did not choose.
        p: One-sided p-value that the gain is above zero.
        tested: Number of those documents.
        holm: The p-value adjusted over all verdicts of the build; None until `adjust`.
    """

    metric: str
    candidate: str
    gain: float
    p: float
    tested: int
    holm: float | None = None


def folds(keys: Sequence[str], count: int, seed: int) -> list[list[int]]:
    """Split document numbers into folds of like size; documents with the same content key stay together."""
    clusters: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        clusters.setdefault(key, []).append(i)
    order = list(clusters.values())
    random.Random(seed).shuffle(order)
    parts: list[list[int]] = [[] for _ in range(count)]
    for cluster in order:
        min(parts, key=len).extend(cluster)
    return [sorted(p) for p in parts if p]


def shares(keys: Sequence[str], parts: Sequence[float], seed: int) -> list[list[int]]:
    """Split document numbers into parts of given shares; the last part takes the rest. Keys stay together."""
    clusters: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        clusters.setdefault(key, []).append(i)
    order = list(clusters.values())
    random.Random(seed).shuffle(order)
    split: list[list[int]] = [[] for _ in range(len(parts) + 1)]
    bounds = [sum(parts[: i + 1]) * len(keys) for i in range(len(parts))]
    placed, part = 0, 0
    for cluster in order:
        while part < len(parts) and placed >= bounds[part] - 0.5:
            part += 1
        split[part].extend(cluster)
        placed += len(cluster)
    return [sorted(p) for p in split]


def cross_fit(
    table: ScoreTable, metric: str, candidates: Sequence[str], search: Search, objective: str, count: int, seed: int
) -> Verdict:
    """Search on all folds but one, compare the winner with the base on the fold left out, for every fold.

    The test is taken on the reported figure whatever the objective of the search, because that is what is claimed.
    """
    parts = folds(table.keys, count, seed)
    gains: list[float] = []
    keys: list[str] = []
    for held_out in parts:
        inside = [i for part in parts if part is not held_out for i in part]
        if not inside:
            continue
        winner = search(table, candidates, inside, objective, seed)
        gains += table.gains(winner, held_out)
        keys += [table.keys[i] for i in held_out]
    final = search(table, candidates, range(len(table.keys)), objective, seed)
    if not gains:
        return Verdict(metric, final, 0.0, 1.0, 0)
    return Verdict(metric, final, sum(gains) / len(gains), paired_test(gains, keys, seed), len(gains))


def held_out(table: ScoreTable, metric: str, candidate: str, guard: Sequence[int], seed: int) -> Verdict:
    """Compare a fitted candidate with the base on documents that neither fitted nor stopped it."""
    gains = table.gains(candidate, guard)
    p = paired_test(gains, [table.keys[i] for i in guard], seed)
    return Verdict(metric, candidate, sum(gains) / len(gains), p, len(gains))


def adjust(verdicts: Sequence[Sequence[Verdict]]) -> list[list[Verdict]]:
    """Adjust the p-values of all verdicts of all subdomains together (Holm)."""
    flat = [v for group in verdicts for v in group]
    adjusted = iter(holm([v.p for v in flat]))
    return [[replace(v, holm=next(adjusted)) for v in group] for group in verdicts]


def accept(verdicts: Sequence[Verdict], alpha: float) -> Verdict | None:
    """The proven candidate with the largest gain, or None: no reliable gain, the base stays."""
    proven = [v for v in verdicts if v.holm is not None and v.holm <= alpha and v.gain > 0]
    return max(proven, key=lambda v: v.gain) if proven else None


def best_case(tested: Sequence[Sequence[int]]) -> list[list[float]]:
    """The adjusted p-values of a build in which every document of every test gained: none can come out smaller.

    Args:
        tested: Per subdomain and metric, how many different documents (content keys) the test has.
    """
    flat = iter(holm([smallest_p(count) for group in tested for count in group]))
    return [[next(flat) for _ in group] for group in tested]


def enough(tests: int, alpha: float) -> int:
    """Different documents with which one of ``tests`` tests can pass at ``alpha``, whatever the others show."""
    return max(1, math.ceil(math.log2(tests / alpha) - 1e-9))
