"""Pictures of plain data, for the papers' figures: curves over ranked bands, tallies, boxes, bars and radars in panels.

A panel is a title and what stands in it, so that the paper's figures and ours are drawn alike, side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from freemoe.report.figures.drawing import (
    WIDE,
    drawable_name,
    first_column,
    is_narrow,
    legend_above,
    make_panels,
    new_figure,
    set_bottom_label,
    set_panel_title,
    to_svg,
    with_report_style,
)
from freemoe.report.palette import FAINT, INK, PAPER, SHADE, SOFT, light_colour, theme_css

HUES = ("expert", "rival", "routed", "oracle", "control", "wanda", "magnitude", "base")
"""Colours of series, in their order; a dash and a marker tell them apart as well."""

_DASHES = ("-", "--", "-.", ":")
_MARKERS = "os^Dv<>P"
_FEWEST_SPOKES = 3

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Series -> points."""

Bars = Mapping[str, Mapping[str, tuple[float, float, float]]]
"""Category -> series -> value and the ends of its interval; the value itself where there is none."""


def _series(found: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each series is drawn."""
    return {
        name: {
            "color": light_colour(HUES[i % len(HUES)]),
            "ls": _DASHES[i % len(_DASHES)],
            "marker": _MARKERS[i % len(_MARKERS)],
        }
        for i, name in enumerate(dict.fromkeys(found))
    }


def _legend(figure: Figure, looks: Mapping[str, Mapping[str, Any]]) -> None:
    legend_above(
        figure, [Line2D([], [], markersize=4, lw=1.4, label=drawable_name(n, 34), **look) for n, look in looks.items()]
    )


@with_report_style
def curves(
    found: Mapping[str, Curves], x: str, y: str, level: Mapping[str, float] | None = None, width: float = WIDE
) -> Figure | None:
    """Curves of several series (MoDE Fig. 1 and 5): title -> series -> points.

    Args:
        found: Panel by panel.
        x: Of the axis below.
        y: Of the axis at the left.
        level: Title -> where a dashed line stands, such as the base.
        width: In inches.
    """
    if not any(points for panel in found.values() for points in panel.values()):
        return None
    looks = _series([name for panel in found.values() for name in panel])
    figure, axes = make_panels(len(found), 3, width=width, height=2.6)
    for place, (title, panel) in zip(axes, found.items(), strict=True):
        for name, points in panel.items():
            place.plot([a for a, _ in points], [b for _, b in points], lw=1.3, markersize=3.4, **looks[name])
        if level and title in level:
            place.axhline(level[title], color=INK, lw=0.9, ls=(0, (4, 3)))
        set_panel_title(place, title, most=30)
        place.yaxis.set_major_locator(MaxNLocator(5))
        place.grid()
        place.margins(y=0.1)
        if first_column(place):
            place.set_ylabel(y)
    _legend(figure, looks)
    set_bottom_label(figure, x)
    return figure


@with_report_style
def tallies(
    found: Mapping[str, Sequence[tuple[float, float, float, float]]], x: str, width: float = WIDE
) -> Figure | None:
    """How many improve above the line, how many get worse below (MoDE Fig. 2): title -> (start, end, better, worse)."""
    if not any(found.values()):
        return None
    most = max(max(row[2:]) for rows in found.values() for row in rows)
    figure, axes = make_panels(len(found), 2, width=width, height=2.7)
    for place, (title, rows) in zip(axes, found.items(), strict=True):
        for start, end, better, worse in rows:
            look = {"edgecolor": light_colour("expert"), "lw": 1}
            place.bar((start + end) / 2, better, 0.85 * (end - start), color=light_colour("expert"), **look)
            place.bar((start + end) / 2, -worse, 0.85 * (end - start), color=PAPER, **look)
        place.axhline(0, color=INK, lw=0.9)
        place.set_xlim(0, 1)
        place.set_ylim(-most - 0.6, most + 0.6)
        place.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        place.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{abs(v):g}"))
        place.grid(axis="y", color=FAINT)
        set_panel_title(place, title, most=34)
        if first_column(place):
            place.set_ylabel("worse   |   improved")
    set_bottom_label(figure, x)
    return figure


@with_report_style
def boxes(found: Mapping[str, Mapping[str, Sequence[float]]], x: str, width: float = WIDE) -> Figure | None:
    """Box plots (MoDE Fig. 4): title -> label -> lowest, lower quarter, median, upper quarter, highest."""
    if not any(found.values()):
        return None
    count = max(len(rows) for rows in found.values())
    figure, axes = make_panels(len(found), 2, width=width, height=0.9 + 0.3 * count)
    figure.set_figheight(
        max(float(figure.get_size_inches()[1]), 0.6 + (1.1 + 0.26 * count) * (len(found) if is_narrow(width) else 1))
    )
    for place, (title, rows) in zip(axes, found.items(), strict=True):
        for at, (low, first, middle, third, high) in enumerate(rows.values()):
            place.plot([low, high], [at, at], color=SOFT, lw=1, zorder=1)
            place.barh(at, third - first, 0.56, left=first, color=SHADE, edgecolor=SOFT, zorder=2)
            place.plot([middle] * 2, [at - 0.28, at + 0.28], color=light_colour("expert"), lw=2.2, zorder=3)
            for end in (low, high):
                place.plot([end] * 2, [at - 0.14, at + 0.14], color=SOFT, lw=1)
        place.axvline(0, color=INK, lw=0.9, zorder=0)
        place.set_yticks(range(len(rows)), [drawable_name(name, 18 if is_narrow(width) else 26) for name in rows])
        place.set_ylim(len(rows) - 0.5, -0.5)
        place.xaxis.set_major_locator(MaxNLocator(5))
        place.tick_params(axis="y", length=0)
        place.grid(axis="x")
        set_panel_title(place, title, most=34)
    set_bottom_label(figure, x)
    return figure


@with_report_style
def bars(found: Mapping[str, Bars], y: str, width: float = WIDE) -> Figure | None:
    """Bars with intervals (Free-MoE Fig. 5): title -> category -> series -> value, low, high."""
    shown = {title: panel for title, panel in found.items() if panel}
    if not shown:
        return None
    looks = _series([s for panel in shown.values() for own in panel.values() for s in own])
    rows = math.ceil(len(shown) / (1 if is_narrow(width) else 2))
    figure, axes = make_panels(len(shown), 2, width=width, height=2.8)
    figure.set_figheight((2.2 if is_narrow(width) else 2.9) * rows + 0.6)
    for place, (title, panel) in zip(axes, shown.items(), strict=True):
        _bars(place, panel, looks, is_narrow(width))
        set_panel_title(place, title, most=34)
        if first_column(place):
            place.set_ylabel(y)
    legend_above(figure, [Patch(color=look["color"], label=drawable_name(n)) for n, look in looks.items()])
    return figure


def _bars(axes: Axes, panel: Bars, looks: Mapping[str, Mapping[str, Any]], narrow: bool) -> None:
    thick = 0.8 / len(looks)
    for at, own in enumerate(panel.values()):
        for i, name in enumerate(looks):
            if name in own:
                value, low, high = own[name]
                x = at + thick * (i - (len(looks) - 1) / 2)
                axes.bar(x, value, 0.9 * thick, color=looks[name]["color"])
                axes.plot([x, x], [low, high], color=INK, lw=1)
    axes.axhline(0, color=INK, lw=0.9)
    turned = {"rotation": 30, "ha": "right"} if narrow or len(panel) > 4 else {}
    axes.set_xticks(range(len(panel)), [drawable_name(name, 18) for name in panel], **turned)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.margins(y=0.12)


@with_report_style
def radars(found: Mapping[str, Mapping[str, Mapping[str, float]]], width: float = WIDE) -> Figure | None:
    """Radars (Free-MoE Fig. 4), bars where spokes are few or a phone is narrow: title -> series -> spoke -> value."""
    shown = {title: panel for title, panel in found.items() if panel}
    if not shown:
        return None
    if is_narrow(width) or any(len(next(iter(panel.values()))) < _FEWEST_SPOKES for panel in shown.values()):
        turned = {
            title: {
                spoke: {name: (own[spoke],) * 3 for name, own in panel.items()} for spoke in next(iter(panel.values()))
            }
            for title, panel in shown.items()
        }
        return bars(turned, "score, %", width)
    columns = min(2, len(shown))
    figure = new_figure(min(width, 5.0 * columns), 4.4 * math.ceil(len(shown) / columns) + 0.5)
    looks = _series([name for panel in shown.values() for name in panel])
    for number, (title, panel) in enumerate(shown.items()):
        axes = figure.add_subplot(math.ceil(len(shown) / columns), columns, number + 1, projection="polar")
        _radar(axes, panel, looks)
        set_panel_title(axes, title, most=34)
    _legend(figure, looks)
    return figure


def _radar(axes: Any, panel: Mapping[str, Mapping[str, float]], looks: Mapping[str, Mapping[str, Any]]) -> None:
    spokes = list(next(iter(panel.values())))
    angles = [2 * math.pi * i / len(spokes) for i in range(len(spokes))]
    axes.set_theta_offset(math.pi / 2)
    axes.set_theta_direction(-1)
    for name, own in panel.items():
        values = [own[s] for s in spokes]
        axes.plot([*angles, angles[0]], [*values, values[0]], lw=1.5, markersize=3.4, **looks[name])
    axes.set_ylim(0, min(100.0, 1.08 * max(10.0, *(v for own in panel.values() for v in own.values()))))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(axis="y", labelsize=7.5)
    axes.spines["polar"].set_color(FAINT)
    axes.set_xticks(angles, [drawable_name(s, 18) for s in spokes])


# ---------------------------------------------------------------------- as a file that stands alone


@dataclass(frozen=True)
class Words:
    """What a picture is called, and what it shows to those who do not see it."""

    name: str
    title: str
    text: str


def as_file(figure: Figure | None, words: Words) -> str:
    """An SVG file that stands alone: it follows the reader's colour scheme, and carries its text alternative.

    Raises:
        ValueError: There is nothing to draw.
    """
    if figure is None:
        raise ValueError(f"{words.name}: nothing to draw.")
    svg = to_svg(figure, words.name, words.title, words.text)
    look = f":root{{--font:system-ui,sans-serif;background:var(--paper)}}\n{theme_css()}"
    svg = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return svg.replace(">", f">\n<style>{look}</style>", 1)
