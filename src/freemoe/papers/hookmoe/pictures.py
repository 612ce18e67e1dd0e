"""HookMoE's figures, drawn from filled tables: the paper's numbers where it prints them, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from freemoe.papers.hookmoe.work import AVERAGE, GROUPS
from freemoe.report.figures.drawing import heading, new_figure, shaded, style, styled, to_svg
from freemoe.report.palette import BASE, EXPERT, RIVAL

Filled = Mapping[str, Any]


def _values(filled: Filled, column: str, who: str) -> list[float | None]:
    """A column of the table: the paper's numbers or ours; None where there is none."""
    if who == "paper":
        return [row["paper"].get(column) for row in filled["rows"]]
    return [row["ours"][column]["value"] if column in row["ours"] else None for row in filled["rows"]]


def _svg(figure: Figure | None, filled: Filled, text: str) -> str:
    assert figure is not None
    with style():
        return to_svg(figure, filled["table"].replace("/", "-"), filled["title"], text)


def sweep(filled: Filled) -> str:
    """Figure 1: mean score by first and last group, the paper's beside ours; darker is better."""
    return _svg(_sweep(filled), filled, "Two grids, first group against last group; each cell is the mean score.")


@styled
def _sweep(filled: Filled) -> Figure:
    figure = new_figure(10.0, 4.2)
    for axes, who in zip(figure.subplots(1, 2), ("paper", "ours"), strict=True):
        values = _values(filled, AVERAGE, who)
        known = [v for v in values if v is not None]
        low, high = min(known, default=0.0), max(known, default=1.0)
        shares = [[0.0] * GROUPS for _ in range(GROUPS)]
        numbers: dict[tuple[int, int], str] = {}
        for row, value in zip(filled["rows"], values, strict=True):
            first, last = (int(g) for g in row["label"].split(" to "))
            if value is not None:
                shares[first][last] = 0.1 + 0.9 * (value - low) / ((high - low) or 1.0)
                numbers[first, last] = f"{value:.1f}"
        shaded(axes, shares, 1.0, "expert", lambda i, j, n=numbers: n.get((i, j), ""))
        axes.set_xticks([g + 0.5 for g in range(GROUPS)], [str(g) for g in range(GROUPS)])
        axes.set_yticks([g + 0.5 for g in range(GROUPS)], [str(g) for g in range(GROUPS)])
        axes.set_xlabel("last group")
        axes.set_ylabel("first group")
        heading(axes, who, "mean score, %")
    return figure


def speeds(filled: Filled) -> str:
    """Figure 3: bars of the two ratios."""
    return _svg(_bars(filled, ("TTFT", "ITL")), filled, "Bars: time of the full mixture over that of the trimmed one.")


@styled
def _bars(filled: Filled, columns: tuple[str, ...]) -> Figure:
    figure = new_figure(6.0, 3.2)
    axes = figure.subplots()
    labels = [row["label"] for row in filled["rows"]]
    for number, (column, colour) in enumerate(zip(columns, (EXPERT, RIVAL), strict=False)):
        pairs = zip(_values(filled, column, "ours"), _values(filled, column, "paper"), strict=True)
        heights = [own if own is not None else paper or 0.0 for own, paper in pairs]
        axes.bar([i + 0.4 * number - 0.2 for i in range(len(labels))], heights, 0.36, color=colour, label=column)
    axes.set_xticks(range(len(labels)), labels)
    axes.axhline(1.0, color=BASE, linewidth=1)
    axes.set_ylabel("full over trimmed")
    axes.legend()
    return figure


def top_k(filled: Filled) -> str:
    """Figure 4: mean score by k."""
    return _svg(
        _lines(filled, AVERAGE, "experts per token, k", "mean score, %"), filled, "Score against k, paper and ours."
    )


def training(filled: Filled) -> str:
    """Figure 5: held-out loss by share of the steps."""
    return _svg(
        _lines(filled, "loss", "share of the steps", "held-out loss, nats per token"), filled, "Loss against steps."
    )


@styled
def _lines(filled: Filled, column: str, across: str, up: str) -> Figure:
    figure = new_figure(6.0, 3.2)
    axes = figure.subplots()
    labels = [row["label"] for row in filled["rows"]]
    for who, colour, marker in (("paper", RIVAL, "s"), ("ours", EXPERT, "o")):
        points = [(i, v) for i, v in enumerate(_values(filled, column, who)) if v is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=who)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend()
    return figure
