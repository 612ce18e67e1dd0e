"""What the papers' figures share: values of a filled table, lines and bars of the paper's and ours, an SVG that stands alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from freemoe.report.figures.drawing import new_figure, with_report_style
from freemoe.report.palette import BASE, EXPERT, RIVAL
from reproduce.figures import Words, as_file

Filled = Mapping[str, Any]


def value(row: Mapping[str, Any], column: str, who: str = "ours") -> float | None:
    """A number of a filled table's row, the paper's or ours; None where there is none."""
    if who == "paper":
        return row["paper"].get(column)
    return row["ours"][column]["value"] if column in row["ours"] else None


def values(filled: Filled, column: str, who: str) -> list[float | None]:
    """A column of a table, row by row; None where there is no number.

    Args:
        filled: What `running.measure` returns.
        column: Its name.
        who: ``paper`` or ``ours``.
    """
    return [value(row, column, who) for row in filled["rows"]]


def standalone(figure: Figure | None, filled: Filled, text: str) -> str:
    """An SVG that shows itself outside of a page, with its title and ``text`` for those who do not see it."""
    return as_file(figure, Words(filled["table"].replace("/", "-"), filled["title"], text))


@with_report_style
def lines(filled: Filled, column: str, across: str, up: str) -> Figure:
    """A column as two lines over the rows: the paper's numbers, where it prints them, and ours."""
    figure = new_figure(6.0, 3.2)
    axes = figure.subplots()
    labels = [row["label"] for row in filled["rows"]]
    for who, colour, marker in (("paper", RIVAL, "s"), ("ours", EXPERT, "o")):
        points = [(i, v) for i, v in enumerate(values(filled, column, who)) if v is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=who)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend()
    return figure


@with_report_style
def bars(filled: Filled, columns: Sequence[str], up: str, level: float | None = None) -> Figure:
    """A group of bars per row, one per column: ours, or the paper's where a row is the paper's alone.

    Args:
        filled: The table.
        columns: At most two.
        up: Name of the axis.
        level: Where a line is drawn.
    """
    figure = new_figure(6.0, 3.2)
    axes = figure.subplots()
    labels = [row["label"] for row in filled["rows"]]
    for number, (column, colour) in enumerate(zip(columns, (EXPERT, RIVAL), strict=False)):
        pairs = zip(values(filled, column, "ours"), values(filled, column, "paper"), strict=True)
        heights = [own if own is not None else paper or 0.0 for own, paper in pairs]
        places = [i + 0.4 * number - 0.2 * (len(columns) - 1) for i in range(len(labels))]
        axes.bar(places, heights, 0.36, color=colour, label=column)
    axes.set_xticks(range(len(labels)), labels)
    if level is not None:
        axes.axhline(level, color=BASE, linewidth=1)
    axes.set_ylabel(up)
    axes.legend()
    return figure
