"""What tables and pictures of benchmarks share: a grid of Markdown, intervals and bytes in words, a grid of panels, an SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from freemoe.report.figures.drawing import new_figure


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; rows may be short."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" * (1 + len(head) - len(row)) for row in rows]
    return "\n".join(lines)


def interval(values: Sequence[float | None] | None, digits: int, unit: str = "", signed: bool = True) -> str:
    """``+0.123 [+0.100, +0.150]``; empty where there is none."""
    if not values or values[0] is None:
        return ""
    sign = "+" if signed else ""
    mean, *ends = ["?" if v is None else f"{v:{sign}.{digits}f}" for v in values]
    return f"{mean}{unit} [{', '.join(ends)}]"


def size(number: float | None, digits: int = 2) -> str:
    """Bytes as MB, or as KB with so many digits; a dash for none."""
    if not number:
        return "-"
    return f"{number / 1e6:.2f} MB" if number >= 1e5 else f"{number / 1e3:.{digits}f} KB"


def panels(
    count: int, columns: int, width: float, height: float, more: tuple[float, float]
) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels of a size, in rows of so many, with more room around them; all inches."""
    rows, across = math.ceil(count / columns), min(columns, count)
    figure = new_figure(width * across + more[0], height * rows + more[1])
    axes = list(figure.subplots(rows, across, squeeze=False).flatten())
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def svg(figure: Figure) -> str:
    """The figure as a picture that stands alone: the same bytes for the same figure."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()
