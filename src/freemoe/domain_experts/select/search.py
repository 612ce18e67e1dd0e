"""Search over candidates on reference documents: every one on all (the papers), or successive halving."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from freemoe.core.registry import Registry
from freemoe.domain_experts.recipe import SEARCHES as NAMES
from freemoe.domain_experts.select.scores import ScoreTable

# (table, candidates, document numbers, objective, seed) -> name of the best candidate
Search = Callable[[ScoreTable, Sequence[str], Sequence[int], str, int], str]

SEARCHES: Registry[Search] = Registry("search", NAMES)

_FIRST_DOCUMENTS = 16
_SURVIVORS = 2


def exhaustive_search(
    table: ScoreTable, candidates: Sequence[str], documents: Sequence[int], objective: str, seed: int = 0
) -> str:
    """Score every candidate on every document (MoDE Algorithm 1); the largest mean wins, among equals the first named.

    On the same documents the mean ranks as the mean paired gain does, and needs no base.
    """
    return max(candidates, key=lambda c: table.mean_objective(c, documents, objective))


def successive_halving(
    table: ScoreTable, candidates: Sequence[str], documents: Sequence[int], objective: str, seed: int
) -> str:
    """Successive halving: few documents for all candidates, more for the better half, all for the last two.

    Comparisons are paired: all that are compared see the same documents.
    """
    order = list(documents)
    random.Random(seed).shuffle(order)
    alive = list(candidates)
    rounds = max(0, math.ceil(math.log2(max(1, len(alive)) / _SURVIVORS)))
    size = max(_FIRST_DOCUMENTS, len(order) // 2**rounds) if rounds else len(order)
    while len(alive) > _SURVIVORS and size < len(order):
        means = {c: table.mean_objective(c, order[:size], objective) for c in alive}
        ranked = sorted(alive, key=lambda c: -means[c])
        keep = ranked[: max(_SURVIVORS, (len(alive) + 1) // 2)]
        alive = [c for c in candidates if c in keep]
        size *= 2
    return exhaustive_search(table, alive, documents, objective)


SEARCHES.add("exhaustive", exhaustive_search, "every candidate on every reference document (the papers)")
SEARCHES.add("halving", successive_halving, "successive halving with paired comparisons")
