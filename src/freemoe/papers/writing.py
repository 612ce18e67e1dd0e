"""A filled table in words: Markdown, lines for the terminal, the picture; everything from plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freemoe.core.files import write_atomic
from freemoe.papers.running import DONE
from freemoe.papers.table import Table, load_function


def number(value: float) -> str:
    """As tables print it: two decimals, one above a hundred, none above ten thousand."""
    return f"{value:,.{2 if abs(value) < 100 else 1 if abs(value) < 1e4 else 0}f}"


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
    """Header and rows of a filled table: per column the paper's number and ours side by side."""
    columns = filled["columns"]
    header = ["row", *(f"{c}{unit}: {who}" for c, unit in columns.items() for who in ("paper", "ours"))]
    rows = []
    for row in filled["rows"]:
        cells = [row["label"]]
        for column in columns:
            paper, own = row["paper"].get(column), row["ours"].get(column)
            cells.append("" if paper is None else number(paper))
            cells.append(ours(own) if own else "")
        if row["status"] != DONE:
            cells[0] += f" ({row['status']}{': ' + row['why'] if row['why'] else ''})"
        rows.append(cells)
    return header, rows


def heading(filled: Mapping[str, Any]) -> str:
    """Name and title."""
    return f"{filled['table']}: {filled['title']} (scale {filled['scale']})"


def notes(filled: Mapping[str, Any]) -> list[str]:
    """What belongs under the table: the difference in protocol, what stands in for what."""
    lines = [f"Protocol: {filled['protocol']}."] if filled["protocol"] else []
    return lines + ([f"In place of the paper's: {filled['approximated']}."] if filled["approximated"] else [])


def markdown(filled: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    header, rows = grid(filled)
    lines = [f"### {heading(filled)}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", *notes(filled), ""])


def save(filled: dict[str, Any], table: Table, folder: Path) -> dict[str, Path]:
    """Write ``PAPER/TABLE.SCALE.json``, ``.md`` and, of a figure, ``.svg``; returns what is where."""
    stem = folder / f"{table.name}.{filled['scale']}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    texts = {"json": json.dumps(filled, indent=1), "md": markdown(filled)}
    if table.picture and any(row["ours"] for row in filled["rows"]):
        texts["svg"] = load_function(table.picture)(filled)
    written = {}
    for kind, text in texts.items():
        written[kind] = stem.with_name(f"{stem.name}.{kind}")
        write_atomic(written[kind], text.encode())
    return written
