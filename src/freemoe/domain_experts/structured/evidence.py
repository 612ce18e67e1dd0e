"""What units off do on the reported split: the curve over shares, the rivals at equal counts, size and speed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from freemoe.core.errors import FreeMoEError
from freemoe.domain_experts.prove.evidence import ScoreUnder
from freemoe.domain_experts.structured.fitting import FoundUnits
from freemoe.domain_experts.structured.measure import cost
from freemoe.domain_experts.structured.shrink import shrink
from freemoe.domain_experts.structured.units import UnitsOff
from freemoe.evals.summary import mean_scores, summary
from freemoe.evals.tasks.documents import Document
from freemoe.models.mask import Mask


def no_worse(row: dict[str, Any]) -> bool:
    """Whether a row's 95 % interval holds the base or lies on its better side."""
    return row["ratio"]["low"] <= 1 if "ratio" in row else row["gain"]["high"] >= 0


def unit_evidence(
    found: FoundUnits, documents: Sequence[Document], score: ScoreUnder, seeds: Sequence[int]
) -> dict[str, Any]:
    """Score one subdomain's reported documents along the curve, and under the rivals at every share.

    Args:
        found: What structured purification found; nothing is chosen here any more.
        documents: Opened reported documents of the subdomain.
        score: Scores documents with weights off; journalled.
        seeds: Of the draws of random units, per share.

    Returns:
        ``points``: per share its units, stopping loss and figure against the base, beside ``rivals`` and ``random``;
        ``largest_share``: the largest share whose interval does not leave the base for the worse, 0 where all do.
    """
    units, curve = found.units, found.curve
    base = score("base", Mask, documents)

    def row(name: str, off: UnitsOff) -> dict[str, Any]:
        return summary(score(name, partial(units.mask, off), documents), base, documents)

    points = []
    for i, point in enumerate(curve.points):
        rivals = {n: row(f"{n} {point.asked}", off) for n, off in found.rivals[i].items()}
        runs = [
            score(f"random {r} {point.asked}", partial(units.mask, found.random(i, seed)), documents)
            for r, seed in enumerate(seeds)
        ]
        if runs:
            rivals["random"] = summary(mean_scores(runs), base, documents, runs)
        points.append(
            {
                "asked": point.asked,
                "share": point.share,
                "units": units.number_off(point.off),
                "per_layer": {str(n): len(numbers) for n, numbers in point.off.items()},
                "stopping_loss": point.loss,
                "candidate": i == found.best,
                "row": row(f"units {point.asked}", point.off),
                "rivals": rivals,
            }
        )
    good = [p["share"] for p in points if no_worse(p["row"])]
    return {
        "kind": units.kind,
        "of": units.total,
        "start": curve.start,
        "stopping_loss_of_base": curve.base,
        "looks": [list(look) for look in curve.looks],
        "points": points,
        "largest_share": max(good, default=0.0),
        "singles": found.singles.count,
    }


def cut_evidence(model: Any, found: FoundUnits) -> dict[str, Any]:
    """Size and speed of the model with the candidate's units cut out; or why it cannot be cut."""
    try:
        small = shrink(model, found.units, found.point.off)
    except FreeMoEError as error:
        return {"cannot": str(error)}
    return cost(model, small)
