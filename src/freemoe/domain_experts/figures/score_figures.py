"""Pictures of scores: improvement bars (Free-MoE Fig. 5) and a radar (Free-MoE Fig. 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from freemoe.domain_experts.result import BuildResult
from freemoe.report.figures.drawing import (
    ROW_LABELS,
    ROW_MARKERS,
    WIDE,
    drawable_name,
    is_narrow,
    legend_above,
    new_figure,
    report_figure,
    row_axis,
)
from freemoe.report.figures.gain_figures import finite_interval
from freemoe.report.palette import FAINT, INK, SOFT, light_colour, row_role
from freemoe.results.scores import ScoredDomain, ScoreRow

_FEWEST_SPOKES, _MOST_SPOKES = 3, 16


@report_figure(
    "improvement",
    "Improvement per domain",
    "Paired gain per domain with its 95 % interval; for text, by how many per cent perplexity falls. Up is better.",
)
def improvement_bars(result: BuildResult, width: float = WIDE) -> Figure | None:
    """Improvement over the base per domain, as bars with 95 % intervals (Free-MoE Fig. 5)."""
    kinds = [(text, [d for d in result.domains if d.is_text == text]) for text in (False, True)]
    kinds = [(text, domains) for text, domains in kinds if domains]
    shown = [n for n in ("expert", "routed", "control") if any(n in d.rows for d in result.domains)]
    if not kinds or not shown:
        return None
    if is_narrow(width):
        # At most three domains a line, so that their figures stand clear of each other.
        kinds = [(text, domains[i : i + 3]) for text, domains in kinds for i in range(0, len(domains), 3)]
        figure = new_figure(width, 0.6 + 2.6 * len(kinds))
        places = [figure.add_subplot(len(kinds), 1, k + 1) for k in range(len(kinds))]
    else:
        widths = [len(domains) for _, domains in kinds]
        figure = new_figure(min(width, 3.8 + 1.7 * sum(widths) + 0.8 * len(kinds)), 3.5)
        grid = figure.add_gridspec(1, len(kinds), width_ratios=[n + 0.4 for n in widths])
        places = [figure.add_subplot(grid[0, k]) for k in range(len(kinds))]
    for axes, (text, domains) in zip(places, kinds, strict=True):
        _draw_bars(axes, domains, shown, text, 6.5 if is_narrow(width) else 7.5)
    legend_above(figure, [Patch(color=light_colour(row_role(n)), label=ROW_LABELS[n]) for n in shown])
    return figure


def _draw_bars(axes: Axes, domains: Sequence[ScoredDomain], shown: list[str], text: bool, writing: float) -> None:
    width = 0.8 / len(shown)
    for i, domain in enumerate(domains):
        for j, name in enumerate(shown):
            row = domain.rows.get(name)
            if row is None or not (values := finite_interval(row, text)):
                continue
            # Perplexity: by how many per cent it falls, so that up is better in both panels.
            values = [100 * (1 - v) for v in values] if text else values
            x = i + width * (j - (len(shown) - 1) / 2)
            axes.bar(x, values[0], 0.9 * width, color=light_colour(row_role(name)))
            axes.plot([x] * len(values[1:]), sorted(values[1:]), color=INK, lw=1)
            high = max(values)
            axes.annotate(
                f"{values[0]:+.1f}", (x, high if values[0] >= 0 else min(values)), (0, 3 if values[0] >= 0 else -3),
                "data", "offset points", ha="center", va="bottom" if values[0] >= 0 else "top", fontsize=writing, color=SOFT,
            )  # fmt: skip
    axes.axhline(0, color=INK, lw=0.9)
    axes.set_xticks(range(len(domains)), [drawable_name(d.name, 16) for d in domains])
    axes.set_xlim(-0.6, len(domains) - 0.4)
    axes.set_ylabel("fall of perplexity, %" if text else "gain, points")
    axes.grid(axis="y")
    axes.margins(y=0.12)
    axes.tick_params(axis="x", length=0)


@report_figure(
    "radar",
    "Base, expert and routed mixture",
    "Score in per cent: along each spoke, or, where there are fewer than three or no room, as bars. Further out is better. Text "
    "domains are not in it.",
)
def score_radar(result: BuildResult, width: float = WIDE) -> Figure | None:
    """Score of base, expert and routed mixture over subdomains, or domains (Free-MoE Fig. 4); bars where spokes are few."""
    domains = [d for d in result.domains if not d.is_text]
    spokes = [(s.name, s.rows) for d in domains for s in d.scored_subdomains]
    if len(spokes) > _MOST_SPOKES:
        spokes = [(d.name, d.rows) for d in domains]
    shown = [n for n in ("base", "expert", "routed") if all(n in rows for _, rows in spokes)]
    if not spokes or len(shown) < 2:
        return None
    few = len(spokes) < _FEWEST_SPOKES
    return _score_bars(spokes, shown, width) if few or is_narrow(width) else _radar_figure(spokes, shown)


def _score_bars(spokes: list[tuple[str, dict[str, ScoreRow]]], shown: list[str], width: float) -> Figure:
    """Scores as bars, one group a line."""
    figure = new_figure(min(width, 7.0), 0.9 + 0.2 * len(shown) * len(spokes) + 0.12 * len(spokes))
    axes = figure.add_subplot()
    height = 0.8 / len(shown)
    for i, (_, rows) in enumerate(spokes):
        for j, name in enumerate(shown):
            y, score = i + height * (j - (len(shown) - 1) / 2), rows[name].score
            axes.barh(y, score, 0.86 * height, color=light_colour(row_role(name)))
            axes.annotate(
                f"{score:.1f}", (score, y), (3, 0), "data", "offset points", va="center", fontsize=7.5, color=SOFT
            )
    row_axis(axes, [drawable_name(name, 14 if is_narrow(width) else 24) for name, _ in spokes])
    axes.set_xlim(0, 1.14 * max(1.0, *(rows[n].score for _, rows in spokes for n in shown)))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("score, %")
    legend_above(figure, [Patch(color=light_colour(row_role(n)), label=ROW_LABELS[n]) for n in shown], 3)
    return figure


def _radar_figure(spokes: list[tuple[str, dict[str, ScoreRow]]], shown: list[str]) -> Figure:
    figure = new_figure(7.0, 5.4)
    axes: Any = figure.add_subplot(projection="polar")
    axes.set_theta_offset(math.pi / 2)
    axes.set_theta_direction(-1)
    angles = [2 * math.pi * i / len(spokes) for i in range(len(spokes))]
    for name in shown:
        values = [rows[name].score for _, rows in spokes]
        dashed = {"base": "--", "routed": ":"}.get(name, "-")
        axes.plot(
            [*angles, angles[0]], [*values, values[0]], dashed, color=light_colour(name), lw=1.8, label=ROW_LABELS[name],
            marker=ROW_MARKERS[name] if name != "base" else "", markersize=4,
        )  # fmt: skip
    base = [rows["base"].score for _, rows in spokes]
    axes.fill([*angles, angles[0]], [*base, base[0]], color=light_colour("base"), alpha=0.12, lw=0)
    top = max(rows[n].score for _, rows in spokes for n in shown)
    axes.set_ylim(0, min(100.0, max(10.0, 1.08 * top)))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_rlabel_position(180 / len(spokes))
    axes.tick_params(axis="y", labelsize=7.5)
    axes.spines["polar"].set_color(FAINT)
    axes.set_xticks(angles, [])
    for angle, (name, _) in zip(angles, spokes, strict=True):
        side = math.sin(angle)
        axes.annotate(
            drawable_name(name, 22), (angle, axes.get_ylim()[1]), (8 * side, 8 * math.cos(angle)), "data", "offset points",
            ha="center" if abs(side) < 0.2 else "left" if side > 0 else "right", va="center", fontsize=8.5, color=INK,
        )  # fmt: skip
    legend_above(figure, axes.get_lines()[: len(shown)], 3)
    return figure
