"""Pictures of the router on the reported documents: what it saw against what was known, and how sure it was."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from freemoe.domain_experts.result import BuildResult
from freemoe.report.figures.drawing import (
    WIDE,
    draw_heatmap,
    drawable_name,
    is_narrow,
    legend_above,
    new_figure,
    report_figure,
)
from freemoe.report.palette import INK, ROUTED, SOFT

_MOST_NUMBERED = 16
_BINS = 20
_LEGIBLE = 0.2  # inches of a cell that a number fits into
_TENTHS = 10


def _routed_documents(result: BuildResult) -> list[dict[str, Any]]:
    return [d for domain in result.domains for d in domain.documents if "router_saw" in d]


@report_figure(
    "confusion",
    "What the router saw",
    "Reported documents by known subdomain (rows) and by the subdomain the router saw (columns); shade: share of the "
    "row. The last column counts the documents on which it abstained.",
)
def router_confusion(result: BuildResult, width: float = WIDE) -> Figure | None:
    """Known subdomain against the one the router saw, in documents; the last column counts abstentions."""
    documents = _routed_documents(result)
    order = [s.name for domain in result.domains for s in domain.subdomains]
    seen = {d["subdomain"] for d in documents} | {d["router_saw"] for d in documents}
    names = [n for n in order if n in seen] + sorted(seen - set(order))
    if len(names) < 2:
        return None
    place = {name: i for i, name in enumerate(names)}
    counts = [[0] * len(names) for _ in names]
    abstained = [0] * len(names)
    for d in documents:
        counts[place[d["subdomain"]]][place[d["router_saw"]]] += 1
        abstained[place[d["subdomain"]]] += d["routed_to"] == "base"
    few, narrow = len(names) <= _MOST_NUMBERED, is_narrow(width)
    most, aside_inches = (12, 1.5) if narrow else (22, 3.0)
    cell = min(0.42 if few else 0.24, (width - aside_inches) / (len(names) + 1.5))
    figure = new_figure(aside_inches + cell * (len(names) + 1.5), (1.3 if narrow else 1.9) + cell * len(names))
    axes = figure.add_subplot()
    totals = [max(1, sum(row)) for row in counts]
    shares = [[c / total for c in row] for row, total in zip(counts, totals, strict=True)]
    aside = [[n / total] for n, total in zip(abstained, totals, strict=True)]
    legible = few and cell > _LEGIBLE
    draw_heatmap(axes, shares, 1.0, "routed", (lambda y, x: str(counts[y][x] or "")) if legible else None)
    draw_heatmap(axes, aside, 1.0, "base", (lambda y, x: str(abstained[y])) if legible else None, len(names) + 0.25)
    axes.set_xticks(
        [*(i + 0.5 for i in range(len(names))), len(names) + 0.75], [*(drawable_name(n, most) for n in names), "(abstained)"],
        rotation=45 if few and not narrow else 90, ha="right", rotation_mode="anchor", va="top" if few and not narrow else "center",
    )  # fmt: skip
    axes.set_yticks([i + 0.5 for i in range(len(names))], [drawable_name(n, most) for n in names])
    axes.set_xlabel("what the router saw")
    axes.set_ylabel("known subdomain")
    axes.set_ylim(len(names), 0)
    axes.set_aspect("equal", anchor="W")
    return figure


@report_figure(
    "confidence",
    "How sure the router was",
    "Confidence on the reported documents. The threshold was set on reference documents. And how often a route of "
    "that confidence was right; on the line, confidence is the chance to be right. Larger dots: more documents.",
)
def router_confidence(result: BuildResult, width: float = WIDE) -> Figure | None:
    """How sure the router was, for right and wrong routes, and how often it was right when it was that sure."""
    documents = _routed_documents(result)
    if not documents:
        return None
    threshold = result.router.get("threshold")
    right = [d["confidence"] for d in documents if d["router_saw"] == d["subdomain"]]
    wrong = [d["confidence"] for d in documents if d["router_saw"] != d["subdomain"]]
    narrow = is_narrow(width)
    figure = new_figure(min(width, 9.0), 5.6 if narrow else 2.8)
    axes, beside = figure.subplots(2, 1) if narrow else figure.subplots(1, 2, width_ratios=(2.4, 1))
    edges = [i / _BINS for i in range(_BINS + 1)]
    axes.hist([right, wrong], bins=edges, stacked=True, color=[ROUTED, INK], rwidth=0.92)
    handles: list[Any] = [
        Patch(color=ROUTED, label=f"right subdomain ({len(right)})"),
        Patch(color=INK, label=f"wrong subdomain ({len(wrong)})"),
    ]
    if threshold is not None:
        never = threshold > 1
        axes.axvline(threshold, color=INK, lw=1.4, ls="--")
        label = (
            "threshold above 1: always abstains"
            if never
            else f"threshold {threshold:.3f}: left of it, the base answers"
        )
        handles.append(Line2D([], [], color=INK, lw=1.4, ls="--", label=label))
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("confidence (product of both levels)", color=SOFT)
    axes.set_ylabel("reported documents")
    axes.grid(axis="y")
    _draw_reliability(beside, documents)
    legend_above(figure, handles, 3)
    return figure


def _draw_reliability(axes: Axes, documents: list[dict[str, Any]]) -> None:
    """Share of right routes against mean confidence, one dot per tenth of confidence; its area counts documents."""
    bins: dict[int, list[dict[str, Any]]] = {}
    for d in documents:
        bins.setdefault(min(int(d["confidence"] * _TENTHS), _TENTHS - 1), []).append(d)
    sure = [sum(d["confidence"] for d in part) / len(part) for part in bins.values()]
    right = [sum(d["router_saw"] == d["subdomain"] for d in part) / len(part) for part in bins.values()]
    axes.plot([0, 1], [0, 1], color=SOFT, lw=1)
    axes.scatter(sure, right, [12 + 160 * len(part) / len(documents) for part in bins.values()], color=ROUTED)
    axes.set_xlim(0, 1.06)
    axes.set_ylim(-0.06, 1.06)
    axes.set_xlabel("confidence", color=SOFT)
    axes.set_ylabel("share of right routes")
    axes.set_aspect("equal", anchor="W")
