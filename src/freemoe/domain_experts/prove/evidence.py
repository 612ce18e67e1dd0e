"""What the experts do on the reported split, beside the base, a control and the papers' oracle.

Nothing here chooses: the reported documents open only for a `FrozenChoice`, and every number goes to `result.json`.
Rows of a domain:

* ``base``: nothing switched off.
* ``expert``: each document under the expert of its known subdomain ("DENoise" / "DOWP" in the papers).
* ``routed``: under the expert that the router picks, or the base where it abstains ("MoDE" / "Free-MoE").
* ``control``: random weights switched off, as many and as large per matrix as those of the subdomain's expert.
* ``oracle``: per subdomain the candidate that is best *on these very documents*: the papers' protocol, not a result, and so
  without an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from freemoe.domain_experts.context import MakeMask
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.statistics import Interval, mean_of_means
from freemoe.evals.summary import mean_scores, paired_gain, reported_metric, shared_figures, summarise_scores
from freemoe.evals.tasks.documents import Document
from freemoe.models.mask import Mask
from freemoe.models.mixed.rows import rows_by_key
from freemoe.models.weights import WeightMatrix

# (unit name, what makes the mask, documents) -> scores
ScoreUnder = Callable[[str, MakeMask, Sequence[Document]], Sequence[DocumentScore]]

_ROUTE = ("routed_to", "router_saw", "confidence")


def scatter_scores(
    parts: Sequence[tuple[Sequence[int], Sequence[DocumentScore]]], default: Sequence[DocumentScore]
) -> list[DocumentScore]:
    """Lay scores of parts of the documents over a default row."""
    row = list(default)
    for indices, scores in parts:
        for i, s in zip(indices, scores, strict=True):
            row[i] = s
    return row


def where_off(mask: Mask, weights: Sequence[WeightMatrix]) -> list[dict[str, Any]]:
    """Where in the network the switched-off weights lie: share per layer and sublayer."""
    cells: dict[tuple[int, str], list[int]] = {}
    for weight in weights:
        cell = cells.setdefault((weight.layer, weight.sublayer), [0, 0])
        cell[0] += len(mask.get(weight.name, ()))
        cell[1] += weight.size
    return [
        {"layer": layer, "sublayer": sublayer, "off": off, "of": size}
        for (layer, sublayer), (off, size) in cells.items()
    ]


def domain_evidence(
    documents: Sequence[Document],
    known: Sequence[int],
    names: Sequence[str],
    routes: Sequence[tuple[str, str, float]],
    experts: dict[str, MakeMask],
    candidates: dict[str, dict[str, MakeMask]],
    controls: Callable[[str, int], Mask],
    control_seeds: int,
    score: ScoreUnder,
    fallback: bool = True,
) -> dict[str, Any]:
    """Score one domain's reported documents in every row.

    Args:
        documents: The opened reported documents.
        known: Known subdomain of each document, an index into ``names``.
        names: The domain's subdomains.
        routes: For each document the expert the router picked (``base`` where it abstained), the subdomain it saw, and
            its confidence. Documents sent to their own subdomain's expert, or to the base, are scored once.
        experts: Every accepted expert of the build, by subdomain.
        candidates: Every candidate per subdomain; empty without the oracle.
        controls: ``(subdomain, number)`` -> a random mask as large as the expert's.
        control_seeds: How many controls.
        score: Scores documents with weights off; journalled.
        fallback: Whether the oracle may pick the base too; the papers' (Eq. 7) has no such candidate.
    """
    base = score("base", Mask, documents)
    seen = [names[k] for k in known]
    groups = {name: at for name in names if (at := [i for i, own in enumerate(seen) if own == name])}

    def score_subset(unit: str, off: MakeMask, indices: Sequence[int]) -> Sequence[DocumentScore]:
        return score(unit, off, [documents[i] for i in indices])

    own = {n: score_subset(f"expert {n}", experts[n], g) for n, g in groups.items() if n in experts}
    expert = scatter_scores([(groups[n], s) for n, s in own.items()], base)
    # Where no expert was accepted a control has nothing to match, and the row is left out.
    control_runs = []
    for r in range(control_seeds if own else 0):
        scored = [(groups[n], score_subset(f"control {r} {n}", partial(controls, n, r), groups[n])) for n in own]
        control_runs.append(scatter_scores(scored, base))
    swept = {
        n: {c: score_subset(f"oracle {n} {c}", make, groups[n]) for c, make in candidates[n].items()}
        for n in groups
        if candidates.get(n)
    }
    picks = {n: _best_row(rows, [base[i] for i in groups[n]] if fallback else None) for n, rows in swept.items()}
    routed = [expert[i] if picked == seen[i] else base[i] for i, (picked, _, _) in enumerate(routes)]
    away = {n: at for n in experts if (at := [i for i, (who, _, _) in enumerate(routes) if who == n != seen[i]])}
    sent = [(at, score_subset(f"routed to {n}", experts[n], at)) for n, at in away.items()]
    table = {
        "base": base,
        "expert": expert,
        "routed": scatter_scores(sent, routed),
        "control": mean_scores(control_runs) if control_runs else None,
        "oracle": scatter_scores([(groups[n], scores) for n, (_, scores) in picks.items()], base) if swept else None,
    }
    table = {name: row for name, row in table.items() if row is not None}
    summaries = partial(_row_summaries, table, control_runs, documents)

    def subdomain_evidence(name: str, group: Sequence[int]) -> dict[str, Any]:
        candidates = {c: reported_metric(s, [documents[i] for i in group]) for c, s in swept.get(name, {}).items()}
        return {"rows": summaries(group), "candidates": candidates, "oracle_candidate": picks.get(name, (None,))[0]}

    return {
        "rows": summaries(range(len(documents))),
        "tasks": {task: summaries(group) for task, group in _groups_by_task(documents).items()},
        "router": _router_on(routes, seen),
        "subdomains": {name: subdomain_evidence(name, group) for name, group in groups.items()},
        "documents": [
            {"id": f"{d.task}/{d.id}", "key": d.key, "subdomain": own, **dict(zip(_ROUTE, route, strict=True))}
            | {name: row[i].value for name, row in table.items()}
            for i, (d, own, route) in enumerate(zip(documents, seen, routes, strict=True))
        ],
    }


def _groups_by_task(documents: Sequence[Document]) -> dict[str, list[int]]:
    """Task -> its documents' places; empty for one task."""
    found = rows_by_key([d.task for d in documents])
    return found if len(found) > 1 else {}


def _best_row(
    rows: Mapping[str, Sequence[DocumentScore]], base: Sequence[DocumentScore] | None
) -> tuple[str, Sequence[DocumentScore]]:
    """The candidate, or the base, that is best on these very documents, with its scores; each further figure at its own best."""
    rows = rows if base is None else {"base": base, **rows}
    name, scores = max(rows.items(), key=lambda row: sum(score.value for score in row[1]))
    further = {
        key: max(rows.values(), key=lambda row: sum(dict(s.also)[key] for s in row)) for key in shared_figures(scores)
    }
    return name, [
        DocumentScore(*score[:3], tuple((key, dict(row[i].also)[key]) for key, row in further.items()))
        for i, score in enumerate(scores)
    ]


def _row_summaries(
    table: dict[str, list[DocumentScore]],
    controls: Sequence[Sequence[DocumentScore]],
    documents: Sequence[Document],
    group: Sequence[int],
) -> dict[str, dict[str, Any]]:
    """The rows of some of the documents."""
    part = [documents[i] for i in group]
    rows = {name: [row[i] for i in group] for name, row in table.items()}
    draws = [[run[i] for i in group] for run in controls]
    found = {n: summarise_scores(row, rows["base"], part, draws if n == "control" else ()) for n, row in rows.items()}
    if draws:
        under, _ = paired_gain(rows["control"], rows["expert"], part, draws)
        found["expert"]["over_control"] = under.scaled(-1).as_json()
    if "oracle" in found:
        found["oracle"] = _without_intervals(found["oracle"])
    return found


def _without_intervals(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose documents chose it: what an interval or a test would say of other documents is not so."""
    ends = {name: {**row[name], "low": None, "high": None} for name in ("gain", "ratio") if name in row}
    if "also" in row:
        ends["also"] = {name: _without_intervals(other) for name, other in row["also"].items()}
    return {k: v for k, v in {**row, **ends}.items() if k != "mcnemar_p"}


def _router_on(routes: Sequence[tuple[str, str, float]], known: Sequence[str]) -> dict[str, float]:
    """How often the router was right on reported documents, whether or not it then abstained."""
    found = [
        (saw.split("/")[0] == own.split("/")[0], saw == own, picked == "base")
        for (picked, saw, _), own in zip(routes, known, strict=True)
    ]
    return dict(
        zip(("domain_accuracy", "subdomain_accuracy", "abstained"), np.mean(found, axis=0).tolist(), strict=True)
    )


def mean_gain(domains: Sequence[dict[str, Any]], row: str) -> Interval:
    """Mean over domains, each counting the same, of a row's gain in points; 0 where a domain lacks the row, as no expert is."""
    present = [d for d in domains if any(row in doc for doc in d["documents"])]
    parts = [
        ([doc[row] - doc["base"] for doc in d["documents"]], [doc["key"] for doc in d["documents"]]) for d in present
    ]
    draws = [[gain / 100 for gain in d["rows"][row].get("seeds") or ()] for d in present]
    found = mean_of_means(parts, len(domains) - len(parts), draws).scaled(100)
    return Interval(found.mean, -math.inf, math.inf) if row == "oracle" else found


def overall_gains(domains: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Average over the task domains of the gain in points, each domain counting the same, with its 95 % interval.

    A row that a domain lacks (no expert, so no control) counts as its base there.
    """
    tasks = [d for d in domains if d["unit"] == "points"]
    found: dict[str, Any] = {"domains": [d["name"] for d in tasks]}
    for row in ("expert", "routed", "control", "oracle"):
        if any(row in d["rows"] for d in tasks):
            found[row] = mean_gain(tasks, row).as_json()
    return found
