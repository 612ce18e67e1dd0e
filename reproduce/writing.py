"""A filled table in words: Markdown, lines for the terminal, the picture; everything from plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from freemoe.core import neutral
from freemoe.core.files import write_atomic
from reproduce.running import DONE, PAPER_ONLY
from reproduce.table import Table

LABEL, GAP = 30, 3
"""Characters of a row's label in a terminal at most, and of what parts two columns."""


def number(value: float) -> str:
    """As tables print it: two decimals, one above a hundred, none above a thousand."""
    return f"{value:,.{2 if abs(value) < 100 else 1 if abs(value) < 1e3 else 0}f}"


def ours(measured: Mapping[str, Any]) -> str:
    """Our figure with its interval: ``61.20, +1.20 [+0.10, +2.30]; oracle 63.00``."""
    text = number(measured["value"])
    low, high, gain = measured["low"], measured["high"], measured["gain"]
    if gain is not None:
        text += f", {gain:+.2f}"
    if low is not None and high is not None:
        sign = "+" if gain is not None else ""
        text += f" [{low:{sign}.2f}, {high:{sign}.2f}]"
    return text + (f"; oracle {number(measured['oracle'])}" if measured["oracle"] is not None else "")


def grid(filled: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a filled table: the paper's number and ours side by side; what nobody fills is left out.

    Where every row is the paper's or ours, one column holds both. A line is a row of the table; where it has far more columns
    than rows, a line is a column of it.
    """
    rows, units = filled["rows"], filled["columns"]
    labels = [row["label"] + ("" if row["status"] in (DONE, PAPER_ONLY) else f" ({row['status']})") for row in rows]
    heads = [column + unit for column, unit in units.items()]
    pairs = [[_pair(row, column) for column in units] for row in rows]
    if len(heads) > 2 * len(rows):
        labels, heads, pairs = heads, labels, [list(line) for line in zip(*pairs, strict=True)]
    header, lines = [""], [[label] for label in labels]
    for n, head in enumerate(heads):
        sides = {who: [line[n][side] for line in pairs] for side, who in enumerate(("paper", "ours"))}
        if all(map(any, sides.values())) and not any(map(all, zip(*sides.values(), strict=True))):
            sides = {"": [one or other for one, other in zip(*sides.values(), strict=True)]}
        for who, cells in sides.items():
            if any(cells):
                header.append(f"{head}: {who}" if who else head)
                for line, cell in zip(lines, cells, strict=True):
                    line.append(cell)
    return header, lines


def blocks(header: list[str], lines: list[list[str]], width: int) -> list[list[int]]:
    """The columns that stand side by side in a terminal, block after block, each beside the labels, no number broken."""
    widths = [max(len(line[n]) for line in [header, *lines]) for n in range(len(header))]
    found: list[list[int]] = []
    used = 0
    for n in range(1, len(header)):
        if not found or used + widths[n] + GAP > width:
            found.append([])
            used = min(widths[0], LABEL) + GAP
        found[-1].append(n)
        used += widths[n] + GAP
    return found


def _pair(row: Mapping[str, Any], column: str) -> tuple[str, str]:
    paper, own = row["paper"].get(column), row["ours"].get(column)
    return "" if paper is None else number(paper), ours(own) if own else ""


def heading(filled: Mapping[str, Any]) -> str:
    """Name and title."""
    return f"{filled['table']}: {filled['title']} (scale {filled['scale']})"


def notes(filled: Mapping[str, Any]) -> list[str]:
    """What belongs under the table: what ran, what the paper does, what ours does not fill, and why."""
    reasons: dict[str, list[str]] = {}
    for row in filled["rows"]:
        if row["why"]:
            reasons.setdefault(f"{row['status']}: {row['why']}", []).append(row["label"])
    lines = [f"Protocol: {filled['protocol']}."] if filled["protocol"] else []
    lines += [f"{filled['notes'][0].upper()}{filled['notes'][1:].removesuffix('.')}."] if filled["notes"] else []
    theirs, ours = ({column: None for row in filled["rows"] for column in row[who]} for who in ("paper", "ours"))
    if (missing := [column for column in theirs if column not in ours]) and ours:
        lines.append(f"The paper's alone at this scale: {', '.join(missing)}.")
    every = len(filled["rows"])
    return lines + [f"{'Every row' if len(of) == every else '; '.join(of)}: {why}" for why, of in reasons.items()]


def markdown(filled: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    header, rows = grid(filled)
    lines = [f"### {heading(filled)}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(neutral.escape_markdown(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", *map(neutral.escape_markdown, notes(filled)), ""])


def save(filled: dict[str, Any], table: Table, folder: Path) -> dict[str, Path]:
    """Write ``PAPER/TABLE.SCALE.json``, ``.md`` and, of a figure, ``.svg``; returns what is where."""
    stem = folder / f"{table.name}.{filled['scale']}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    texts = {"json": json.dumps(filled, indent=1), "md": markdown(filled)}
    if table.picture and any(row["ours"] for row in filled["rows"]):
        texts["svg"] = resolve_name(table.picture)(filled)
    written = {}
    for kind, text in texts.items():
        written[kind] = stem.with_name(f"{stem.name}.{kind}")
        write_atomic(written[kind], text.encode())
    return written
