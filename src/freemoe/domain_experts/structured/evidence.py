"""What units off do on the reported split: the curve over shares, the rivals at equal counts, size and speed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from freemoe.core.errors import FreeMoEError
from freemoe.domain_experts.prove.evidence import ScoreUnder
from freemoe.domain_experts.structured.fitting import FoundUnits
from freemoe.domain_experts.structured.measure import compare_cost
from freemoe.domain_experts.structured.shrink import shrink
from freemoe.domain_experts.structured.units import UnitsOff
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.statistics import MIN_CLUSTERS, mean_interval
from freemoe.evals.summary import is_text, mean_scores, summarise_scores
from freemoe.evals.tasks.documents import Document
from freemoe.models.mask import Mask

MARGINS = {True: 0.01, False: 1.0}
"""Loss that counts as none unless a recipe says another: of text nats per token, else points."""


def is_harmless(
    scores: Sequence[DocumentScore], base: Sequence[DocumentScore], documents: Sequence[Document], margin: float
) -> bool:
    """Whether a loss of ``margin`` is ruled out: the lower end of the gain's 95 % interval lies above it.

    That a loss is not significant says nothing: with few documents none is. Too few to judge are not harmless either.
    """
    keys, text = [d.key for d in documents], is_text(documents)
    gains = [a.value - b.value for a, b in zip(scores, base, strict=True)]
    low = mean_interval(gains, keys, [max(1, s.tokens) for s in base] if text else None).low
    return len(set(keys)) >= MIN_CLUSTERS and low * (1 if text else 100) >= -margin


def largest_harmless(
    result: FoundUnits, guard: Sequence[Document], score: ScoreUnder, margin: float | None
) -> dict[str, Any]:
    """The largest share of units whose loss is shown to be below a margin, on documents that neither fitted nor stopped.

    Shares are tested from the smallest up until one fails, so that the whole sequence errs as seldom as one test does. The
    guard's documents decided nothing; the margin is in points, of text in nats per token, and `MARGINS` if None.
    """
    margin = MARGINS[is_text(guard)] if margin is None else margin
    base, largest = score("base", Mask, guard), 0.0
    for point in result.curve.points:
        off = partial(result.units.mask, point.off)
        if not is_harmless(score(f"units {point.requested}", off, guard), base, guard, margin):
            break
        largest = point.share
    return {"largest_share": largest, "margin": margin, "guard_documents": len(guard)}


def unit_evidence(
    result: FoundUnits, documents: Sequence[Document], score: ScoreUnder, seeds: Sequence[int]
) -> dict[str, Any]:
    """Score one subdomain's reported documents along the curve, and under the rivals at every share.

    Nothing is chosen here any more; ``seeds`` are of the draws of random units, per share.

    Returns:
        ``points``: per share its units, stopping loss and figure against the base, beside ``rivals`` and ``random``.
    """
    units, curve = result.units, result.curve
    base = score("base", Mask, documents)

    def summary_row(name: str, off: UnitsOff) -> dict[str, Any]:
        return summarise_scores(score(name, partial(units.mask, off), documents), base, documents)

    points = []
    for i, point in enumerate(curve.points):
        rivals = {n: summary_row(f"{n} {point.requested}", off) for n, off in result.rivals[i].items()}
        runs = [
            score(f"random {r} {point.requested}", partial(units.mask, result.random_units(i, seed)), documents)
            for r, seed in enumerate(seeds)
        ]
        if runs:
            rivals["random"] = summarise_scores(mean_scores(runs), base, documents, runs)
        points.append(
            {
                "asked": point.requested,
                "share": point.share,
                "units": units.number_off(point.off),
                "per_layer": {str(n): len(numbers) for n, numbers in point.off.items()},
                "stopping_loss": point.loss,
                "candidate": i == result.best_index,
                "row": summary_row(f"units {point.requested}", point.off),
                "rivals": rivals,
            }
        )
    return {
        "kind": units.kind,
        "of": units.num_units,
        "start": curve.start,
        "stopping_loss_of_base": curve.base,
        "looks": [list(look) for look in curve.looks],
        "points": points,
        "singles": result.singles.count,
    }


def cut_evidence(model: Any, result: FoundUnits) -> dict[str, Any]:
    """Size and speed of the model with the candidate's units cut out; or why it cannot be cut."""
    try:
        small = shrink(model, result.units, result.best_point.off)
    except FreeMoEError as error:
        return {"cannot": str(error)}
    return compare_cost(model, small)
