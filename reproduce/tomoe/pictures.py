"""ToMoE's figures, drawn from filled tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from freemoe.report.figures.drawing import new_figure, set_panel_title, with_report_style
from freemoe.report.palette import BASE, CONTROL, EXPERT, ORACLE, RIVAL, ROUTED
from reproduce.drawing import Filled, standalone, value

# Colour, marker and dash: what is told apart by one is told apart by all.
LOOKS = (
    (EXPERT, "o", "-"),
    (RIVAL, "s", "--"),
    (ROUTED, "^", "-."),
    (ORACLE, "D", ":"),
    (CONTROL, "v", "-"),
    (BASE, "x", "--"),
)


def _line(axes: Any, look: int, label: str, xs: Sequence[float], ys: Sequence[float | None]) -> None:
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    if points:
        colour, marker, dash = LOOKS[look % len(LOOKS)]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=dash, markersize=4, label=label)


def widths(filled: Filled) -> str:
    """Figures 5, 6a, 7 and 9: a line per column over the depth."""
    return standalone(_by_depth(filled, list(filled["columns"])), filled, "One line per kind of width, over the depth.")


def usage(filled: Filled) -> str:
    """Figure 4: the experts' shares over the depth, the most used first."""
    columns = [c for c in filled["columns"] if c != "evenness" and any(c in row["ours"] for row in filled["rows"])]
    return standalone(
        _by_depth(filled, columns), filled, "Shares of the experts over the depth, the most used expert first."
    )


@with_report_style
def _by_depth(filled: Filled, columns: Sequence[str]) -> Figure:
    figure = new_figure(6.0, 3.2)
    axes = figure.subplots()
    rows = filled["rows"]
    for look, column in enumerate(columns):
        _line(axes, look, column, range(len(rows)), [value(row, column) for row in rows])
    axes.set_xticks(range(len(rows)), [row["label"].removeprefix("depth ") for row in rows])
    axes.set_xlabel("depth")
    axes.set_ylabel("%")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7.5, ncols=2)
    return figure


def boxes(filled: Filled) -> str:
    """Figure 8: a box per depth."""
    return standalone(_boxes(filled), filled, "A box per layer: least, quartiles and most of its experts' widths.")


@with_report_style
def _boxes(filled: Filled) -> Figure:
    figure = new_figure(6.0, 3.2)
    axes = figure.subplots()
    names = {"whislo": "least", "q1": "lower", "med": "median", "q3": "upper", "whishi": "most"}
    rows = [row for row in filled["rows"] if row["ours"]]
    stats = [{key: value(row, name) for key, name in names.items()} | {"fliers": []} for row in rows]
    axes.bxp(stats, showfliers=False, medianprops={"color": EXPERT})
    axes.set_xticks(range(1, len(rows) + 1), [row["label"].removeprefix("depth ") for row in rows])
    axes.set_xlabel("depth")
    axes.set_ylabel("width of experts, % of the layer's")
    return figure


def dynamics(filled: Filled) -> str:
    """Figure 3: four losses against steps, a line per active share."""
    return standalone(_dynamics(filled), filled, "Four panels of losses against steps; one line per active share.")


@with_report_style
def _dynamics(filled: Filled) -> Figure:
    figure = new_figure(8.0, 5.0)
    shares: dict[str, list[Mapping[str, Any]]] = {}
    for row in filled["rows"]:
        shares.setdefault(row["label"].partition(",")[0], []).append(row)
    for axes, column in zip(figure.subplots(2, 2).flat, ("distillation", "R_P", "R_U", "R_L"), strict=True):
        for look, (share, rows) in enumerate(shares.items()):
            steps = [100 * n / (len(rows) - 1) for n in range(len(rows))]
            _line(axes, look, f"{share} active", steps, [value(row, column) for row in rows])
        set_panel_title(axes, column)
        axes.set_xlabel("% of the steps")
    figure.axes[0].legend(fontsize=7.5)
    return figure


def ablation(filled: Filled) -> str:
    """Figure 6c: a bar per setting."""
    return standalone(_bars(filled, "Average"), filled, "Bars: mean score of every setting, with its interval.")


@with_report_style
def _bars(filled: Filled, column: str) -> Figure:
    figure = new_figure(7.0, 3.4)
    axes = figure.subplots()
    rows = [row for row in filled["rows"] if column in row["ours"]]
    heights = [value(row, column) or 0.0 for row in rows]
    axes.barh(range(len(rows)), heights, color=[EXPERT if "ToMoE" in row["label"] else ROUTED for row in rows])
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"{column}, %")
    return figure


def accuracy(filled: Filled) -> str:
    """Figure 10: accuracy against the share of active weights, the paper's points and ours."""
    return standalone(_accuracy(filled), filled, "Accuracy against active share; the paper's points and ours.")


@with_report_style
def _accuracy(filled: Filled) -> Figure:
    figure = new_figure(6.0, 3.2)
    axes = figure.subplots()
    rows = filled["rows"]
    shares = [float(row["label"].split()[0]) for row in rows]
    _line(axes, 0, "ours", shares, [value(row, "MMLU") for row in rows])
    _line(axes, 1, "paper", shares, [value(row, "MMLU", "paper") for row in rows])
    axes.set_xlabel("active weights, %")
    axes.set_ylabel("accuracy, %")
    axes.legend()
    return figure
