"""Rows of MoDE's and Free-MoE's tables that are made of numbers printed elsewhere: of Table 1, and of Tables 7 to 11, cluster by cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from reproduce.mode.work import five_numbers, ours_of

_NUMBERS = yaml.safe_load(Path(__file__).with_name("numbers.yaml").read_text(encoding="utf-8"))
COLUMNS: list[str] = _NUMBERS["columns"]
BANDS: list[str] = _NUMBERS["bands"]
MODELS: dict[str, str] = {model: lines["label"] for model, lines in _NUMBERS["main"].items()}
PICKS = ("base", "expert", "routed")

MAIN: dict[str, dict[str, dict[str, float]]] = {
    model: {pick: dict(zip(COLUMNS, lines[pick], strict=True)) for pick in PICKS}
    for model, lines in _NUMBERS["main"].items()
}
"""Table 1: model -> base, expert or routed -> column -> figure."""

CLUSTERS: dict[str, list[tuple[int, dict[str, float]]]] = {
    name: [(samples, dict(zip(BANDS, scores, strict=True))) for samples, *scores in lines]
    for name, lines in _NUMBERS["clusters"].items()
}
"""Tables 7 to 11: task (and metric) -> per cluster its samples, and its figure under each band."""

RowData = dict[str, Any]
"""A row as the tables' files have it."""


def gains(model: str, pick: str) -> dict[str, float]:
    """Table 1's differences to the baseline in points."""
    base, own = MAIN[model]["base"], MAIN[model][pick]
    return {column: round(own[column] - base[column], 2) for column in COLUMNS}


def under_one_band(name: str, band: str) -> float:
    """All clusters under one band: the mean of their figures, weighted by samples."""
    clusters = CLUSTERS[name]
    return sum(n * scores[band] for n, scores in clusters) / sum(n for n, _ in clusters)


def under_best_bands(name: str) -> float:
    """Each cluster under the band that is best on these very samples, weighted by samples."""
    clusters = CLUSTERS[name]
    return sum(n * max(scores.values()) for n, scores in clusters) / sum(n for n, _ in clusters)


SHOWN = {
    "scores": lambda model, pick: MAIN[model][pick],
    "gains": gains,
    "spread": lambda model, pick: five_numbers(list(gains(model, pick).values())),
}
"""What of Table 1 a table or figure has of every model and part of its result."""


def main_rows(called: Mapping[str, str], what: str, changes: Mapping[str, Any] = {}) -> list[RowData]:
    """A row for every model and part of its result: pick -> what the paper calls it."""
    shared = {"changes": changes}
    return [
        {**shared, "of": name, "label": label, "recipe": f"mode/table01-{model}", "pick": pick}
        | ({"paper": SHOWN[what](model, pick)} if pick in PICKS else {})
        for model, name in MODELS.items()
        for pick, label in called.items()
    ]


def _metrics(number: int, task: str, changes: Mapping[str, Any]) -> list[tuple[str, RowData]]:
    """A task's names in `CLUSTERS`, and what its rows share: its recipe, and how pass@10 is asked for."""
    recipe = f"mode/table{number:02d}-{task}"
    return [
        (name, {"recipe": recipe, "changes": {**changes, **({"data.pass_at": 10} if "pass@10" in name else {})}})
        for name in CLUSTERS
        if name.split()[0] == task
    ]


def sweep_rows(number: int, task: str, changes: Mapping[str, Any] = {}) -> list[RowData]:
    """Tables 7 to 11: a task's clusters under every band, and ours, as many as there are."""
    rows: list[RowData] = []
    for name, shared in _metrics(number, task, changes):
        clusters, metric = CLUSTERS[name], name.removeprefix(task).strip()
        before, total = f"{metric}, " if metric else "", sum(n for n, _ in clusters)
        for i, (samples, scores) in enumerate(clusters):
            found = {**scores, "chosen": max(scores.values()), "Samples": samples, "Ratio": 100 * samples / total}
            rows.append(
                {"label": f"{before}{task}_{i}", "paper": found, "absent": "k-means on other documents: other clusters"}
            )
        found = {band: under_one_band(name, band) for band in BANDS}
        found |= {
            "no band": MAIN["llama-2-7b"]["base"][name],
            "chosen": under_best_bands(name),
            "Samples": total,
            "Ratio": 100,
        }
        rows.append(
            {"label": f"{before}all of {task}", "paper": found, "absent": "weighted by samples; no band: Table 1"}
        )
        rows.append({**shared, "label": f"{before}ours: "})
    return rows


def accuracy_rows(tasks: Mapping[int, str], changes: Mapping[str, Any] = {}) -> list[RowData]:
    """Every task under every band, all clusters together; theirs from Tables 7 to 11."""
    rows = []
    for name, shared in (pair for number, task in tasks.items() for pair in _metrics(number, task, changes)):
        figures = {"no band": ("base", MAIN["llama-2-7b"]["base"][name])}
        figures |= {f"{band} %": (ours_of(band), under_one_band(name, band)) for band in BANDS}
        rows += [
            {**shared, "of": name, "label": label, "paper": {"accuracy": theirs}, "pick": pick}
            for label, (pick, theirs) in figures.items()
        ]
    return rows


def width_rows(changes: Mapping[str, Any]) -> list[RowData]:
    """MoDE's Figure 1: bands of 20, 10 and 5 % that cover the whole ranking."""
    rows: list[RowData] = []
    for width in (20, 10, 5):
        shared = {"recipe": f"mode/table03-ratio-{width:02}", "changes": {**changes, "bands.step": width / 100}}
        rows += [] if rows else [{**shared, "label": "base", "pick": "base"}]
        rows += [
            {**shared, "label": f"{width} %, {start}-{start + width} %", "pick": f"{start / 100:.2f}"}
            for start in range(0, 100, width)
        ]
    return rows
