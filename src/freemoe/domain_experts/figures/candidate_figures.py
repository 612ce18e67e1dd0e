"""Pictures of all candidates on the reported split: bands (MoDE Fig. 1, 5), gains (Fig. 4), how many improve (Fig. 2).

None of it chose anything; that it was measured on the reported split is written on every figure.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

from matplotlib.axes import Axes
from matplotlib.cbook import boxplot_stats
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from freemoe.domain_experts.result import BuildResult, SubdomainResult
from freemoe.report.figures.drawing import (
    METRIC_MARKERS,
    WIDE,
    drawable_name,
    first_column,
    is_narrow,
    legend_above,
    make_panels,
    new_figure,
    panels_of,
    ratio_ticks,
    report_figure,
    row_axis,
    set_bottom_label,
    set_panel_title,
    signed_ticks,
    wrap_label,
)
from freemoe.report.palette import COLOURS, CONTROL, FAINT, INK, PAPER, SHADE, SOFT, light_colour
from freemoe.report.reading import gain_sign

NOT_USED = "measured on the reported split, not used to choose"
BAND_AXIS = "share of the ascending importance ranking, 0 = least important"
_FEWEST = 4  # candidates that make a box


def _bands_by_metric(subdomain: SubdomainResult) -> dict[str, list[tuple[float, float, str, float]]]:
    """Metric -> (start, end, candidate, score) of its bands with a finite score, in ascending order."""
    found: dict[str, list[tuple[float, float, str, float]]] = defaultdict(list)
    scores = subdomain.candidates
    for name, (metric, start, end) in subdomain.bands.items():
        if name in scores and math.isfinite(scores[name]):
            found[metric].append((start, end, name, scores[name]))
    return {metric: sorted(rows) for metric, rows in found.items()}


def _metric_colour(metric: str) -> str:
    return CONTROL if metric == "random" else light_colour(metric) if metric in COLOURS else INK


def _candidate_gains(subdomain: SubdomainResult, text: bool) -> dict[str, float]:
    """Gain of every candidate on the reported documents: points above the base, or the perplexity ratio of text."""
    if "base" not in subdomain.rows:
        return {}
    base = subdomain.rows["base"].score
    gains = {n: s / base if text else s - base for n, s in subdomain.candidates.items()}
    return {n: g for n, g in gains.items() if math.isfinite(g) and (g > 0 or not text)}


@report_figure(
    "bands",
    "Score over the bands of the importance ranking",
    "Each point: the score with that share of the ranking switched off. Measured on the reported split, not used to choose.",
)
def band_sweep(result: BuildResult, width: float = WIDE) -> Figure | None:
    """Score over the bands of the importance ranking, one panel per subdomain (MoDE Fig. 1 and 5)."""
    shown = [(d, s) for d in result.domains for s in d.subdomains if _bands_by_metric(s) and s.rows]
    if not shown:
        return None
    shown, note = panels_of(shown, lambda pair: pair[1].chosen != "base")
    figure, axes = make_panels(len(shown), width=width)
    for place, (domain, subdomain) in zip(axes, shown, strict=True):
        _draw_bands(place, subdomain, domain.is_text)
        unit = "perplexity; " if domain.is_text else ""
        set_panel_title(place, subdomain.name, f"{unit}chosen: {subdomain.chosen}")
        if first_column(place):
            place.set_ylabel("perplexity" if domain.is_text else "score, %")
    metrics = list(dict.fromkeys(m for _, s in shown for m in _bands_by_metric(s)))
    switches = list(dict.fromkeys(c for _, s in shown for c in s.candidates if c not in s.bands))
    handles = [
        Line2D(
            [], [], color=_metric_colour(m), marker=METRIC_MARKERS.get(m, "v"), markersize=4, lw=1.3, label=f"{m} band"
        )
        for m in metrics
    ]
    handles += [Line2D([], [], color=_metric_colour(c), ls="-.", lw=1.4, label=f"{c} (no band)") for c in switches]
    handles.append(Line2D([], [], color=INK, ls="--", lw=1, label="base"))
    handles.append(Line2D([], [], color=INK, marker="*", markersize=9, lw=0, label="chosen"))
    legend_above(figure, handles, 6)
    set_bottom_label(figure, f"{BAND_AXIS}\n{NOT_USED}" + (f"\n{note}" if note else ""))
    return figure


def _draw_bands(axes: Axes, subdomain: SubdomainResult, text: bool) -> None:
    chosen = subdomain.chosen
    star = {"marker": "*", "markersize": 11, "color": INK, "markeredgecolor": PAPER, "zorder": 5, "clip_on": False}
    base = subdomain.rows["base"].score
    axes.axhline(base, color=INK, ls="--", lw=1)
    seen = [base]
    for metric, rows in _bands_by_metric(subdomain).items():
        middles, scores = [(a + b) / 2 for a, b, _, _ in rows], [r[3] for r in rows]
        axes.plot(
            middles,
            scores,
            color=_metric_colour(metric),
            marker=METRIC_MARKERS.get(metric, "v"),
            markersize=3.2,
            lw=1.2,
        )
        seen += scores
        for middle, (_, _, name, score) in zip(middles, rows, strict=True):
            if name == chosen:
                axes.plot([middle], [score], **star)
    for name, score in subdomain.candidates.items():
        if name not in subdomain.bands and math.isfinite(score):
            axes.axhline(score, color=_metric_colour(name), ls="-.", lw=1.4)
            seen.append(score)
            if name == chosen:
                axes.plot([0.97], [score], **star)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    axes.grid()
    if text and min(seen) > 0:
        axes.set_yscale("log")
        room = max(1.05, (max(seen) / min(seen)) ** 0.08)
        axes.set_ylim(min(seen) / room, max(seen) * room)
        ratio_ticks(axes.yaxis, *axes.get_ylim(), most=5)
    else:
        axes.margins(y=0.12)
        axes.yaxis.set_major_locator(MaxNLocator(5))


@report_figure(
    "boxes",
    "Gains of all candidates",
    "Every candidate of every subdomain (their number in brackets): boxes span the quartiles, whiskers 1.5 times their "
    "distance. Measured on the reported split, not used to choose.",
)
def candidate_boxes(result: BuildResult, width: float = WIDE) -> Figure | None:
    """Gains of all candidates per domain as boxplots (MoDE Fig. 4)."""
    kinds = []
    for text in (False, True):
        groups = []
        for domain in result.domains:
            if domain.is_text == text:
                found = [g for s in domain.subdomains for g in _candidate_gains(s, text).values()]
                if len(found) >= _FEWEST:
                    groups.append((domain.name, found))
        if groups:
            kinds.append((text, groups))
    if not kinds:
        return None
    rows = [len(groups) for _, groups in kinds]
    figure = new_figure(min(width, 9.0), 0.5 + sum(0.42 * n + 0.9 for n in rows))
    grid = figure.add_gridspec(len(kinds), 1, height_ratios=[0.42 * n + 0.3 for n in rows])
    for k, (text, groups) in enumerate(kinds):
        _draw_boxes(figure.add_subplot(grid[k, 0]), groups, text, width)
    return figure


def _draw_boxes(axes: Axes, groups: list[tuple[str, list[float]]], text: bool, width: float) -> None:
    if text:
        axes.set_xscale("log")
    high, narrow = 0.28, is_narrow(width)
    # Drawn by hand: matplotlib's own boxplot wakes pyplot, which picks a window system for the whole process.
    for y, (_, values) in enumerate(groups):
        box = boxplot_stats(values)[0]
        axes.barh(y, box["q3"] - box["q1"], 2 * high, left=box["q1"], color=SHADE, edgecolor=SOFT)
        axes.plot([box["med"]] * 2, [y - high, y + high], color=SOFT, lw=2.2)
        for end, side in (("whislo", "q1"), ("whishi", "q3")):
            axes.plot([box[end], box[side]], [y, y], color=SOFT, lw=1)
            axes.plot([box[end]] * 2, [y - high / 2, y + high / 2], color=SOFT, lw=1)
        axes.plot(box["fliers"], [y] * len(box["fliers"]), "o", markersize=3, color=SOFT, markerfacecolor=PAPER)
    axes.axvline(1 if text else 0, color=INK, lw=0.9, zorder=0)
    row_axis(axes, [f"{drawable_name(name, 9 if narrow else 20)} ({len(values)})" for name, values in groups])
    if text:
        low, high = min(1.0, *(min(v) for _, v in groups)), max(1.0, *(max(v) for _, v in groups))
        room = max(1.05, (high / low) ** 0.04)
        axes.set_xlim(low / room, high * room)
        ratio_ticks(axes.xaxis, *axes.get_xlim(), most=4 if narrow else 8)
        axes.set_xlabel(wrap_label(f"perplexity / the base's, left of 1 is better\n{NOT_USED}", 0.65 * width))
    else:
        signed_ticks(axes.xaxis, 5 if narrow else 9)
        axes.set_xlabel(wrap_label(f"gain over the base, points\n{NOT_USED}", 0.65 * width))


@report_figure(
    "improved",
    "Subdomains improved per band",
    "Above zero: subdomains whose score is higher (perplexity lower) than the base's with that band off; hollow, below "
    "zero: worse. Differences due to chance count too. Measured on the reported split, not used to choose.",
)
def improved_per_band(result: BuildResult, width: float = WIDE) -> Figure | None:
    """How many subdomains each band improves, and how many it makes worse (MoDE Fig. 2)."""
    tally: dict[str, dict[tuple[float, float], list[int]]] = {}
    for domain in result.domains:
        text = domain.is_text
        for subdomain in domain.subdomains:
            gains = _candidate_gains(subdomain, text)
            for metric, rows in _bands_by_metric(subdomain).items():
                for start, end, name, _ in rows:
                    if name in gains:
                        counts = tally.setdefault(metric, {}).setdefault((start, end), [0, 0])
                        sign = gain_sign(gains[name], text)
                        counts[0] += sign > 0
                        counts[1] += sign < 0
    if not tally:
        return None
    figure, axes = make_panels(len(tally), 2, width=width, height=2.7)
    most = max(count for cells in tally.values() for counts in cells.values() for count in counts)
    for place, (metric, cells) in zip(axes, tally.items(), strict=True):
        _draw_counts(place, cells, _metric_colour(metric))
        set_panel_title(place, f"{metric} bands")
        place.set_ylim(-most - 0.6, most + 0.6)
        if first_column(place):
            place.set_ylabel("worse   |   improved")
    set_bottom_label(figure, f"{BAND_AXIS}\n{NOT_USED}; any difference counts")
    return figure


def _draw_counts(axes: Axes, cells: dict[tuple[float, float], list[int]], color: str) -> None:
    middles = sorted((a + b) / 2 for a, b in cells)
    apart = min((b - a for a, b in itertools.pairwise(middles)), default=0.1)
    for (start, end), (better, worse) in cells.items():
        middle = (start + end) / 2
        axes.bar(middle, better, 0.85 * apart, color=color, edgecolor=color, lw=1)
        axes.bar(middle, -worse, 0.85 * apart, color=PAPER, edgecolor=color, lw=1)
    axes.axhline(0, color=INK, lw=0.9)
    axes.set_xlim(0, 1)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{abs(v):g}"))
    axes.grid(axis="y", color=FAINT)
