"""The picture of what was gained: dots with intervals."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from freemoe.report.figures.drawing import (
    ROW_LABELS,
    ROW_MARKERS,
    WIDE,
    drawable_name,
    is_narrow,
    legend_above,
    new_figure,
    ratio_ticks,
    report_figure,
    row_axis,
    signed_ticks,
    wrap_label,
)
from freemoe.report.palette import INK, PAPER, SHADE, light_colour, row_role
from freemoe.report.reading import compared_rows, interval_of
from freemoe.results.scores import ScoredDomain, ScoreRow

_HOLLOW = ("oracle",)  # not a result, and drawn like none
_MARKERS = "os^v<>pP"


def finite_interval(row: ScoreRow, text: bool) -> list[float]:
    """Mean, low and high; the mean alone where there is no interval, nothing where it cannot be drawn."""
    mean, *ends = interval_of(row, text)
    found = [mean, *ends] if any(map(math.isfinite, ends)) else [mean]
    return found if all(math.isfinite(v) and (v > 0 or not text) for v in found) else []


def _axis_limits(domains: list[ScoredDomain], text: bool) -> tuple[float, float]:
    ends = [
        v
        for d in domains
        for _, rows in d.labelled_rows
        for n in compared_rows(rows)
        for v in finite_interval(rows[n], text)
    ]
    if text:
        low, high = min([1.0, *ends]), max([1.0, *ends])
        room = max(1.02, (high / low) ** 0.04)
        return low / room, high * room
    low, high = min([0.0, *ends]), max([0.0, *ends])
    room = max(0.5, 0.04 * (high - low))
    return low - room, high + room


@report_figure(
    "gains",
    "Gain over the base",
    "Dots: paired difference to the base on held-out documents; lines: 95 % intervals. Hollow diamonds (oracle) were "
    "selected on these very documents and are not a result.",
)
def gain_intervals(result: Any, width: float = WIDE) -> Figure | None:
    """Gain over the base with 95 % intervals, per domain and subdomain: expert, routed, control, oracle side by side."""
    domains = [d for d in result.domains if compared_rows(d.rows)]
    if not domains:
        return None
    shown = list(dict.fromkeys(n for d in domains for n in compared_rows(d.rows)))
    sizes = [max(0.3, 0.13 * len(shown)) * len(d.labelled_rows) for d in domains]
    figure = new_figure(width, 0.9 + sum(n + 0.75 for n in sizes))
    grid = figure.add_gridspec(len(domains), 1, height_ratios=[n + 0.4 for n in sizes])
    # Those of the user's own names differ where their colour does not.
    named = [n for n in shown if n not in ROW_MARKERS]
    markers = {n: ROW_MARKERS.get(n) or _MARKERS[named.index(n) % len(_MARKERS)] for n in shown}
    for k, domain in enumerate(domains):
        axes = figure.add_subplot(grid[k, 0])
        text = domain.is_text
        _draw_intervals(axes, domain, markers, 14 if is_narrow(width) else 30)
        limits = _axis_limits([d for d in domains if d.is_text == text], text)
        inches = 0.6 * width
        if text:
            axes.set_xscale("log")
            ratio_ticks(axes.xaxis, *limits, most=4 if is_narrow(width) else 6)
            axes.set_xlabel(wrap_label("perplexity / the base's (logarithmic; left of 1 is better)", inches))
        else:
            axes.set_xlabel(wrap_label("gain over the base, points (right of 0 is better)", inches))
            signed_ticks(axes.xaxis, 4 if is_narrow(width) else 8)
        axes.set_xlim(*limits)
    handles = [
        Line2D(
            [], [], color=light_colour(row_role(n)), marker=markers[n], markersize=5, lw=1.4, label=drawable_name(ROW_LABELS.get(n, n)),
            markerfacecolor=PAPER if n in _HOLLOW else light_colour(row_role(n)),
        )
        for n in shown
    ]  # fmt: skip
    legend_above(figure, handles)
    return figure


def _draw_intervals(axes: Axes, domain: ScoredDomain, markers: dict[str, str], most: int) -> None:
    text, entries = domain.is_text, domain.labelled_rows
    for i, (_, rows) in enumerate(entries):
        if i == 0 and len(entries) > 1:
            axes.axhspan(-0.5, 0.5, color=SHADE, lw=0, zorder=0)
        for j, (name, marker) in enumerate(markers.items()):
            if name not in rows or not (values := finite_interval(rows[name], text)):
                continue
            y = i + 0.72 * ((j + 0.5) / len(markers) - 0.5)
            own = light_colour(row_role(name))
            axes.plot(values[1:], [y] * len(values[1:]), color=own, lw=1.4, solid_capstyle="butt")
            axes.plot(
                values[:1], [y], color=own, marker=marker, markersize=4.6, lw=0,
                markerfacecolor=PAPER if name in _HOLLOW else own,
            )  # fmt: skip
    axes.axvline(1 if text else 0, color=INK, lw=0.9, zorder=1)
    row_axis(axes, [drawable_name(name, most) for name, _ in entries])
    axes.spines["left"].set_visible(False)
