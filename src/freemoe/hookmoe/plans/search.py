"""Which plan: the paper's two-stage search (Sec. 3.3), and ours: profile every layer and k, then a knapsack.

Every search takes a drop: a function of a plan that says how much worse it is than the full model. The default (in `trim`)
is the held-out KL from the full model in nats; the paper's is points of accuracy on its own test sets, which leaks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from freemoe.core.errors import RecipeError
from freemoe.hookmoe.plans.plan import LayerPlan, tlnle, uniform_plan
from freemoe.text.files import evenly_spaced

MOST_ACTS = 32
"""Acts at which plans are measured as a whole; a model of many layers and a large k has hundreds."""

Drop = Callable[[LayerPlan], float]
Profile = Mapping[tuple[int, int], float]
"""(layer, k) -> drop of running k experts in that layer alone."""


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan that was measured."""

    plan: LayerPlan  # The plan
    drop: float  # Measured with all layers cut together
    predicted: float  # Sum of the layers' own drops; NaN for plans that did not come from a profile
    source: str  # ``solve_knapsack``, ``tlnle``, ``swap`` or ``full``
    rescale: str = "none"  # The rule for router weights under which it was measured


@dataclass(frozen=True)
class TwoStage:
    """What the paper's search found."""

    k: int  # k*, the last uniform k that the tolerance allows (at least 2)
    layer: int  # l*, the smallest l at which TLNLE(k*, l) is allowed; the number of layers where none is
    deployed: LayerPlan  # What Sec. 3.3 deploys: k* - 1 everywhere, with one hook at l*
    measured: tuple[tuple[LayerPlan, float], ...]  # Plans that were measured, with their drops


def two_stage(base: LayerPlan, drop: Drop, tolerance: float) -> TwoStage:
    """The paper's search: lower a uniform k while the drop is tolerable, then find l* by binary search.

    The drop is taken against the full model throughout, in absolute units. Binary search assumes that the drop falls with l;
    the paper's own Table 8 shows that it need not, so a better l may be missed.
    """
    measured: list[tuple[LayerPlan, float]] = []

    def is_tolerable(plan: LayerPlan) -> bool:
        measured.append((plan, drop(plan)))
        return measured[-1][1] <= tolerance

    k = max(b for b in base.ks if b is not None)
    if k < 2:
        raise RecipeError(f"The model runs {k} expert per token: there is nothing to cut.")
    # The second stage takes one more away, so the first ends at 2.
    while k > 2 and is_tolerable(uniform_plan(base, k - 1)):
        k -= 1
    low, high = 0, len(base.ks)
    while low < high:
        middle = (low + high) // 2
        if is_tolerable(tlnle(base, k, middle)):
            high = middle
        else:
            low = middle + 1
    return TwoStage(k, low, uniform_plan(base, k - 1), tuple(measured))


def profile_units(base: LayerPlan) -> list[tuple[int, int]]:
    """Every (layer, k) below the model's own k: what a profile measures."""
    return [(layer, k) for layer, full in enumerate(base.ks) if full is not None for k in range(1, full)]


def solve_knapsack(base: LayerPlan, profile: Profile, best: int = 1) -> dict[int, list[tuple[float, LayerPlan]]]:
    """The plans of least summed drop for every number of executed pairs per token.

    ``best`` plans per number of pairs. Gives pairs per token (summed over layers) -> (summed drop, plan), best first; a
    layer at full k drops nothing.
    """
    table: dict[int, list[tuple[float, tuple[int | None, ...]]]] = {0: [(0.0, ())]}
    for layer, full in enumerate(base.ks):
        grown: dict[int, list[tuple[float, tuple[int | None, ...]]]] = {}
        for pairs, rows in table.items():
            for k in [None] if full is None else range(1, full + 1):
                own = 0.0 if k is None or k == full else profile[layer, k]
                grown.setdefault(pairs + (k or 0), []).extend((d + own, (*ks, k)) for d, ks in rows)
        # The order of plans breaks ties, so that the result does not hang on the order of dicts.
        table = {pairs: sorted(rows, key=_rank_key)[:best] for pairs, rows in sorted(grown.items())}
    return {pairs: [(d, LayerPlan(ks)) for d, ks in rows] for pairs, rows in table.items()}


def _rank_key(row: tuple[float, tuple[int | None, ...]]) -> tuple[float, tuple[int, ...]]:
    return row[0], tuple(k or 0 for k in row[1])


def candidate_plans(
    base: LayerPlan, profile: Profile, best: int = 2, act: float | None = None
) -> list[tuple[LayerPlan, float, str]]:
    """Plans worth measuring as a whole: for every Act the knapsack's best few, and TLNLE's where it has that Act.

    ``best`` per Act, and at most `MOST_ACTS` Acts, evenly spread, besides the ``act`` that is asked for. Gives plan, predicted
    drop (NaN where there is no prediction), source.
    """
    table = solve_knapsack(base, profile, best)
    layers = sum(k is not None for k in base.ks)
    pairs = sorted(table)
    asked = {pairs[i] for i in evenly_spaced(len(pairs), MOST_ACTS)} | {pairs[0], pairs[-1]}
    if act is not None:
        asked |= {max((p for p in pairs if p <= act * layers + 1e-9), default=pairs[0])}
    found: dict[LayerPlan, tuple[float, str]] = {}
    for number in sorted(asked):
        for predicted, plan in table[number]:
            found.setdefault(plan, (predicted, "full" if plan == base else "knapsack"))
    for k in range(2, max(k for k in base.ks if k is not None) + 1):
        for first in range(len(base.ks) + 1):
            plan = tlnle(base, k, first)
            runs = [
                (own, full) for own, full in zip(plan.ks, base.ks, strict=True) if own is not None and full is not None
            ]
            if all(own <= full for own, full in runs) and sum(own for own, _ in runs) in asked:
                found.setdefault(plan, (math.nan, "tlnle"))
    return [(plan, *about) for plan, about in found.items()]


def even_plan(base: LayerPlan, act: float) -> LayerPlan:
    """The plan of at most this Act whose layers differ least: what a rule is tried on before any plan is known."""
    runs = [(layer, k) for layer, k in enumerate(base.ks) if k is not None]
    ks = {layer: 1 for layer, _ in runs}
    left = math.floor(act * len(runs) + 1e-9) - len(runs)
    while left > 0 and any(ks[layer] < k for layer, k in runs):
        for layer, k in runs:
            if left > 0 and ks[layer] < k:
                ks[layer], left = ks[layer] + 1, left - 1
    return LayerPlan(tuple(ks.get(layer) for layer in range(len(base.ks))))


def neighbour_plans(base: LayerPlan, plan: LayerPlan, profile: Profile) -> list[tuple[float, LayerPlan]]:
    """Every plan that runs one expert fewer in one layer and one more in another, the most promising first.

    Each with the summed drop of its layers.
    """

    def layer_drop(layer: int, k: int) -> float:
        return 0.0 if k == base.ks[layer] else profile[layer, k]

    runs = [(layer, k, full) for layer, (k, full) in enumerate(zip(plan.ks, base.ks, strict=True)) if k and full]
    whole = sum(layer_drop(layer, k) for layer, k, _ in runs)
    found = []
    for giver, less, _ in runs:
        for taker, more, most in runs:
            if giver == taker or less == 1 or more == most:
                continue
            predicted = (
                whole
                - layer_drop(giver, less)
                + layer_drop(giver, less - 1)
                - layer_drop(taker, more)
                + layer_drop(taker, more + 1)
            )
            found.append((predicted, plan.with_k(giver, less - 1).with_k(taker, more + 1)))
    return sorted(found, key=lambda row: _rank_key((row[0], row[1].ks)))


def local_swaps(base: LayerPlan, start: MeasuredPlan, profile: Profile, drop: Drop, most: int) -> list[MeasuredPlan]:
    """Plans of the same Act around one that was measured: an expert moves from a layer to another while that loses less.

    Layers interact, so that the plan of least summed drop need not be the best; each swap is measured with all layers cut.
    Swaps are tried in the order that the profile promises, ``most`` at most; every plan that was measured is returned.
    """
    best, measured, tried = start, [], {start.plan}
    improved = True
    while improved:
        improved = False
        for predicted, plan in neighbour_plans(base, best.plan, profile):
            if plan in tried:
                continue
            if len(measured) >= most:
                return measured
            tried.add(plan)
            measured.append(MeasuredPlan(plan, drop(plan), predicted, "swap", start.rescale))
            if measured[-1].drop < best.drop:
                best, improved = measured[-1], True
                break
    return measured


def pareto_front(points: Sequence[MeasuredPlan]) -> list[MeasuredPlan]:
    """The points that no other one beats: falling Act, rising drop."""
    front: list[MeasuredPlan] = []
    for point in sorted(points, key=lambda p: (p.plan.act, p.drop)):
        if not front or point.drop < front[-1].drop:
            front.append(point)
    return front[::-1]


def choose_plan(front: Sequence[MeasuredPlan], act: float | None, tolerance: float) -> MeasuredPlan:
    """The best plan of at most this Act; without one, the cheapest plan within the tolerance.

    Raises:
        RecipeError: No plan has so small an Act.
    """
    if act is None:
        allowed = [p for p in front if p.drop <= tolerance] or [front[0]]
        return min(allowed, key=lambda p: p.plan.act)
    allowed = [p for p in front if p.plan.act <= act + 1e-9]
    if not allowed:
        least = min(p.plan.act for p in front)
        raise RecipeError(f"act is {act:g}, below the least that any plan has: {least:g} (one expert in every layer).")
    return min(allowed, key=lambda p: p.drop)
