"""HookMoE's figures, drawn from filled tables: the paper's numbers where it prints them, and ours."""

from __future__ import annotations

from matplotlib.figure import Figure

from freemoe.report.figures.drawing import draw_heatmap, new_figure, set_panel_title, with_report_style
from reproduce.drawing import Filled, bars, lines, standalone, values
from reproduce.hookmoe.work import GROUPS
from reproduce.scoring import AVERAGE


def sweep(filled: Filled) -> str:
    """Figure 1: mean score by first and last group, the paper's beside ours; darker is better."""
    text = "Two grids, first group against last group; each cell is the mean score."
    return standalone(_sweep(filled), filled, text)


@with_report_style
def _sweep(filled: Filled) -> Figure:
    figure = new_figure(10.0, 4.2)
    for axes, who in zip(figure.subplots(1, 2), ("paper", "ours"), strict=True):
        found = values(filled, AVERAGE, who)
        known = [v for v in found if v is not None]
        low, high = min(known, default=0.0), max(known, default=1.0)
        shares = [[0.0] * GROUPS for _ in range(GROUPS)]
        numbers: dict[tuple[int, int], str] = {}
        for row, value in zip(filled["rows"], found, strict=True):
            first, last = (int(g) for g in row["label"].split(" to "))
            if value is not None:
                shares[first][last] = 0.1 + 0.9 * (value - low) / ((high - low) or 1.0)
                numbers[first, last] = f"{value:.1f}"
        draw_heatmap(axes, shares, 1.0, "expert", lambda i, j, n=numbers: n.get((i, j), ""))
        axes.set_xticks([g + 0.5 for g in range(GROUPS)], [str(g) for g in range(GROUPS)])
        axes.set_yticks([g + 0.5 for g in range(GROUPS)], [str(g) for g in range(GROUPS)])
        axes.set_xlabel("last group")
        axes.set_ylabel("first group")
        set_panel_title(axes, who, "mean score, %")
    return figure


def speeds(filled: Filled) -> str:
    """Figure 3: bars of the two ratios."""
    figure = bars(filled, ("TTFT", "ITL"), "full over trimmed", 1.0)
    return standalone(figure, filled, "Bars: time of the full mixture over that of the trimmed one.")


def top_k(filled: Filled) -> str:
    """Figure 4: mean score by k."""
    figure = lines(filled, AVERAGE, "experts per token and layer", "mean score, %")
    return standalone(figure, filled, "Score against k, the paper's and ours.")


def training(filled: Filled) -> str:
    """Figure 5: held-out loss by share of the steps."""
    figure = lines(filled, "loss", "share of the steps", "held-out loss, nats per token")
    return standalone(figure, filled, "Loss against steps.")
