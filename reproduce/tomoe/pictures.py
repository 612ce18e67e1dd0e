"""ToMoE's figures, drawn from filled tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproduce import figures
from reproduce.figures import WHO, as_file, points, value

Filled = Mapping[str, Any]


def widths(filled: Filled) -> str:
    """Figures 4, 5, 6a, 7 and 9: a line per column over the depth; of Figure 4 the experts' shares, the most used first."""
    rows = filled["rows"]
    depths = [float(row["label"].removeprefix("depth ").removesuffix("%")) for row in rows]
    lines = {column: points(rows, column, depths) for column in filled["columns"] if column != "evenness"}
    return as_file(figures.curves({"ours": lines}, "depth, %", "%"), filled)


def boxes(filled: Filled) -> str:
    """Figure 8: a box per depth."""
    rows = {row["label"]: [row["ours"][c]["value"] for c in filled["columns"]] for row in filled["rows"] if row["ours"]}
    return as_file(figures.boxes({"ours": rows} if rows else {}, "width of experts, % of the layer's"), filled)


def dynamics(filled: Filled) -> str:
    """Figure 3: four losses against steps, a line per active share."""
    shares: dict[str, list[Mapping[str, Any]]] = {}
    for row in filled["rows"]:
        shares.setdefault(row["label"].partition(",")[0], []).append(row)
    panels = {
        column: {
            f"{share} active": points(rows, column, [100 * n / (len(rows) - 1) for n in range(len(rows))])
            for share, rows in shares.items()
        }
        for column in ("distillation", "R_P", "R_U", "R_L")
    }
    return as_file(figures.curves(panels, "% of the steps", "loss"), filled)


def ablation(filled: Filled) -> str:
    """Figure 6c: a bar per setting."""
    found = {row["label"]: value(row, "Average") for row in filled["rows"]}
    bars = {label: {"mean score": (shown, shown, shown)} for label, shown in found.items() if shown is not None}
    return as_file(figures.bars({"ours": bars}, "Average, %"), filled)


def accuracy(filled: Filled) -> str:
    """Figure 10: accuracy against the share of active weights, the paper's points and ours."""
    rows = filled["rows"]
    shares = [float(row["label"].split()[0]) for row in rows]
    lines = {
        f"{who}, {column}": points(rows, column, shares, who)
        for who in WHO
        for column in filled["columns"]
        if column not in ("own text", "active", "perplexity")
    }
    return as_file(
        figures.curves(
            {"accuracy": {name: line for name, line in lines.items() if line}}, "active weights, %", "accuracy, %"
        ),
        filled,
    )
