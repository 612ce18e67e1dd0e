"""The pictures of MoDE's and Free-MoE's figures: the paper's numbers, where it prints them, beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproduce.figures import WHO, as_file, bars, boxes, curves, radars, value, with_interval
from reproduce.mode.work import FIVE

ASCENDING = "share of the ascending importance ranking, 0 = least important; the middle of each band"
THEIRS = "band as the papers name it, % of a ranking that ends at the least important weight"


def sensitivity(filled: Mapping[str, Any]) -> str:
    """Figure 1: accuracy over the bands of the ranking, one curve per width."""
    found: dict[str, list[tuple[float, float]]] = {}
    level: dict[str, float] = {}
    for row in filled["rows"]:
        shown = value(row, "accuracy")
        width, comma, band = row["label"].partition(", ")
        if shown is not None and comma:
            start, end = (float(part) / 100 for part in band.removesuffix(" %").split("-"))
            found.setdefault(width, []).append(((start + end) / 2, shown))
        elif shown is not None:
            level["ours"] = shown
    return as_file(curves({"ours": found}, ASCENDING, "accuracy, %", level), filled)


def tally(filled: Mapping[str, Any]) -> str:
    """Figure 2: how many tasks each band improves, and how many it makes worse, below the line."""
    found = {}
    for row in filled["rows"]:
        better, worse = (value(row, c) for c in ("improved", "worse"))
        if better is not None and worse is not None:
            found[row["label"]] = {"improved": (better,) * 3, "worse": (-worse,) * 3}
    return as_file(bars({"ours": found}, "worse   |   improved"), filled)


def gain_boxes(filled: Mapping[str, Any]) -> str:
    """MoDE Figure 4: the spread of a model's gains over tasks."""
    found: dict[str, dict[str, list[float]]] = {}
    for who in WHO:
        for row in filled["rows"]:
            values = [v for column in FIVE if (v := value(row, column, who)) is not None]
            if len(values) == len(FIVE):
                found.setdefault(who, {})[row["label"]] = values
    return as_file(boxes(found, "gain over the baseline, points"), filled)


def accuracy(filled: Mapping[str, Any]) -> str:
    """MoDE Figure 5, Free-MoE Figure 6: each task under every band, as difference to its base."""
    bases: dict[tuple[str, str], float] = {}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in filled["rows"]:
        task, _, band = row["label"].partition(", ")
        for who in WHO:
            shown = value(row, "accuracy", who)
            if shown is None:
                continue
            if band == "no band":
                bases[task, who] = shown
            else:
                start, end = (float(part) for part in band.removesuffix(" %").split("-"))
                own = found.setdefault(task, {}).setdefault(who, [])
                own.append(((start + end) / 2, shown - bases[task, who]))
    level = dict.fromkeys(found, 0.0)
    return as_file(curves(found, THEIRS, "points over the base", level), filled)


def _by_model(filled: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Model -> series -> row."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in filled["rows"]:
        model, _, series = row["label"].partition(", ")
        found.setdefault(model, {})[series] = row
    return found


def radar(filled: Mapping[str, Any]) -> str:
    """Free-MoE Figure 4: every model's scores, baseline beside experts and mixture."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model, series in _by_model(filled).items():
        for who in WHO:
            panel = {}
            for name, row in series.items():
                own = {c: v for c in filled["columns"] if (v := value(row, c, who)) is not None}
                if own and (not panel or own.keys() == next(iter(panel.values())).keys()):
                    panel[name] = own
            if panel:
                found[f"{who}: {model}"] = panel
    return as_file(radars(found), filled)


def improvement(filled: Mapping[str, Any]) -> str:
    """Free-MoE Figure 5: gains over the baseline, ours with their intervals."""
    found: dict[str, dict[str, dict[str, tuple[float, float, float]]]] = {}
    for model, series in _by_model(filled).items():
        for who in WHO:
            panel: dict[str, dict[str, tuple[float, float, float]]] = {}
            for name, row in series.items():
                for column in filled["columns"]:
                    if shown := with_interval(row, column, who):
                        panel.setdefault(column, {})[name] = shown
            if panel:
                found[f"{who}: {model}"] = panel
    return as_file(bars(found, "gain, points"), filled)
