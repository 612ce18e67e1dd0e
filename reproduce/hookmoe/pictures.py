"""HookMoE's figures, drawn from filled tables: the paper's numbers where it prints them, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from freemoe.report.figures.drawing import draw_heatmap, new_figure, report_style, set_panel_title
from reproduce.figures import WHO, as_file, bars, curves, points, value
from reproduce.hookmoe.work import GROUPS
from reproduce.scoring import AVERAGE

Filled = Mapping[str, Any]


def sweep(filled: Filled) -> str:
    """Figure 1: mean score by first and last group, the paper's beside ours; darker is better."""
    return as_file(_sweep(filled), filled)


@report_style()
def _sweep(filled: Filled) -> Figure:
    figure = new_figure(10.0, 4.2)
    for axes, who in zip(figure.subplots(1, 2), WHO, strict=True):
        found = [value(row, AVERAGE, who) for row in filled["rows"]]
        known = [v for v in found if v is not None]
        low, high = min(known, default=0.0), max(known, default=1.0)
        shares = [[0.0] * GROUPS for _ in range(GROUPS)]
        numbers: dict[tuple[int, int], str] = {}
        for row, score in zip(filled["rows"], found, strict=True):
            first, last = (int(g) for g in row["label"].split(" to "))
            if score is not None:
                shares[first][last] = 0.1 + 0.9 * (score - low) / ((high - low) or 1.0)
                numbers[first, last] = f"{score:.1f}"
        draw_heatmap(axes, shares, 1.0, "expert", lambda i, j, n=numbers: n.get((i, j), ""))
        axes.set_xticks([g + 0.5 for g in range(GROUPS)], [str(g) for g in range(GROUPS)])
        axes.set_yticks([g + 0.5 for g in range(GROUPS)], [str(g) for g in range(GROUPS)])
        axes.set_xlabel("last group")
        axes.set_ylabel("first group")
        set_panel_title(axes, who, "mean score, %")
    return figure


def speeds(filled: Filled) -> str:
    """Figure 3: bars of the two ratios."""
    found = {
        row["label"]: {c: (shown, shown, shown) for c in ("TTFT", "ITL") if (shown := value(row, c)) is not None}
        for row in filled["rows"]
    }
    return as_file(bars({"ours": found}, "full over trimmed"), filled)


def top_k(filled: Filled) -> str:
    """Figure 4: mean score by k."""
    rows = filled["rows"]
    lines = {who: points(rows, AVERAGE, range(1, len(rows) + 1), who) for who in WHO}
    return as_file(curves({AVERAGE: lines}, "experts per token and layer", "mean score, %"), filled)


def training(filled: Filled) -> str:
    """Figure 5: held-out loss by share of the steps."""
    rows = filled["rows"]
    line = points(rows, "loss", [100 * n / (len(rows) - 1) for n in range(len(rows))])
    return as_file(curves({"ours": {"held-out": line}}, "% of the steps", "held-out loss, nats per token"), filled)
