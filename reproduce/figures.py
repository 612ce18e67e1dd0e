"""Pictures of plain data, for the papers' figures: curves over ranked bands, boxes, bars and radars in panels.

A panel is a title and what stands in it, so that the paper's figures and ours are drawn alike, side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from freemoe.report.figures.drawing import (
    WIDE,
    drawable_name,
    first_column,
    legend_above,
    make_panels,
    new_figure,
    report_style,
    set_bottom_label,
    set_panel_title,
    to_svg,
)
from freemoe.report.palette import FAINT, INK, SHADE, SOFT, light_colour, theme_css

HUES = ("expert", "rival", "routed", "oracle", "control", "wanda", "magnitude", "base")
"""Colours of series, in their order; a dash and a marker tell them apart as well."""

WHO = ("paper", "ours")

_DASHES = ("-", "--", "-.", ":")
_MARKERS = "os^Dv<>P"

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


@report_style()
def curves(found: Mapping[str, Curves], x: str, y: str, level: Mapping[str, float] | None = None) -> Figure | None:
    """Curves of several series (MoDE Fig. 1 and 5): title -> series -> points; ``level``: title -> a dashed line, such as the base."""
    if not any(points for panel in found.values() for points in panel.values()):
        return None
    looks = _series([name for panel in found.values() for name in panel])
    figure, axes = make_panels(len(found), 3, height=2.6)
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


@report_style()
def boxes(found: Mapping[str, Mapping[str, Sequence[float]]], x: str) -> Figure | None:
    """Box plots (MoDE Fig. 4): title -> label -> lowest, lower quarter, median, upper quarter, highest."""
    if not any(found.values()):
        return None
    count = max(len(rows) for rows in found.values())
    figure, axes = make_panels(len(found), 2, height=0.9 + 0.3 * count)
    figure.set_figheight(max(float(figure.get_size_inches()[1]), 1.7 + 0.26 * count))
    for place, (title, rows) in zip(axes, found.items(), strict=True):
        for at, (low, first, middle, third, high) in enumerate(rows.values()):
            place.plot([low, high], [at, at], color=SOFT, lw=1, zorder=1)
            place.barh(at, third - first, 0.56, left=first, color=SHADE, edgecolor=SOFT, zorder=2)
            place.plot([middle] * 2, [at - 0.28, at + 0.28], color=light_colour("expert"), lw=2.2, zorder=3)
            for end in (low, high):
                place.plot([end] * 2, [at - 0.14, at + 0.14], color=SOFT, lw=1)
        place.axvline(0, color=INK, lw=0.9, zorder=0)
        place.set_yticks(range(len(rows)), [drawable_name(name, 26) for name in rows])
        place.set_ylim(len(rows) - 0.5, -0.5)
        place.xaxis.set_major_locator(MaxNLocator(5))
        place.tick_params(axis="y", length=0)
        place.grid(axis="x")
        set_panel_title(place, title, most=34)
    set_bottom_label(figure, x)
    return figure


@report_style()
def bars(found: Mapping[str, Bars], y: str) -> Figure | None:
    """Bars with intervals (Free-MoE Fig. 5): title -> category -> series -> value, low, high."""
    shown = {title: panel for title, panel in found.items() if panel}
    if not shown:
        return None
    looks = _series([s for panel in shown.values() for own in panel.values() for s in own])
    figure, axes = make_panels(len(shown), 2, height=2.8)
    figure.set_figheight(2.9 * math.ceil(len(shown) / 2) + 0.6)
    for place, (title, panel) in zip(axes, shown.items(), strict=True):
        _bars(place, panel, looks)
        set_panel_title(place, title, most=34)
        if first_column(place):
            place.set_ylabel(y)
    legend_above(figure, [Patch(color=look["color"], label=drawable_name(n)) for n, look in looks.items()])
    return figure


def _bars(axes: Axes, panel: Bars, looks: Mapping[str, Mapping[str, Any]]) -> None:
    thick = 0.8 / len(looks)
    for at, own in enumerate(panel.values()):
        for i, name in enumerate(looks):
            if name in own:
                value, low, high = own[name]
                x = at + thick * (i - (len(looks) - 1) / 2)
                axes.bar(x, value, 0.9 * thick, color=looks[name]["color"])
                axes.plot([x, x], [low, high], color=INK, lw=1)
    axes.axhline(0, color=INK, lw=0.9)
    turned = {"rotation": 30, "ha": "right"} if len(panel) > 4 else {}
    axes.set_xticks(range(len(panel)), [drawable_name(name, 18) for name in panel], **turned)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.margins(y=0.12)


@report_style()
def radars(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure | None:
    """Radars (Free-MoE Fig. 4): title -> series -> spoke -> value."""
    shown = {title: panel for title, panel in found.items() if panel}
    if not shown:
        return None
    columns = min(2, len(shown))
    figure = new_figure(min(WIDE, 5.0 * columns), 4.4 * math.ceil(len(shown) / columns) + 0.5)
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


# ---------------------------------------------------------------------- of filled tables


def value(row: Mapping[str, Any], column: str, who: str = "ours") -> float | None:
    """A number of a filled table's row, the paper's or ours; None where there is none."""
    if who == "paper":
        return row["paper"].get(column)
    return row["ours"][column]["value"] if column in row["ours"] else None


def points(
    rows: Sequence[Mapping[str, Any]], column: str, xs: Sequence[float], who: str = "ours"
) -> list[tuple[float, float]]:
    """A column over the rows, without those that lack it."""
    found = [(x, value(row, column, who)) for x, row in zip(xs, rows, strict=True)]
    return [(x, y) for x, y in found if y is not None]


def with_interval(row: Mapping[str, Any], column: str, who: str = "ours") -> tuple[float, float, float] | None:
    """A number and the ends of its interval, the number itself where there is none; None where there is no number."""
    shown = value(row, column, who)
    if shown is None:
        return None
    own = row["ours"][column] if who == "ours" else {}
    low, high = own.get("low"), own.get("high")
    return shown, shown if low is None else low, shown if high is None else high


def as_file(figure: Figure | None, filled: Mapping[str, Any]) -> str:
    """An SVG file that stands alone: it follows the reader's colour scheme, and says every number of the table as text.

    Raises:
        ValueError: There is nothing to draw.
    """
    name, said = filled["table"].replace("/", "-"), []
    if figure is None:
        raise ValueError(f"{name}: nothing to draw.")
    for row in filled["rows"]:
        for column in filled["columns"]:
            cells = [f"{who} {shown:.2f}" for who in WHO if (shown := value(row, column, who)) is not None]
            said += [f"{row['label']}, {column}: {', '.join(cells)}"] if cells else []
    svg = to_svg(figure, name, f"{filled['table']}: {filled['title']}", "; ".join(said))
    look = f":root{{--font:system-ui,sans-serif;background:var(--paper)}}\n{theme_css()}"
    svg = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return svg.replace(">", f">\n<style>{look}</style>", 1)
