"""Plain tables of a result for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from freemoe.core.numbers import format_decimals
from freemoe.report.reading import gain_text
from freemoe.results import EvaluationResult


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of cells that are text already."""
    shown = Table(*header, box=None)
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown


def evaluation_table(result: EvaluationResult) -> Table:
    """Every domain's rows of an evaluation: score, paired difference to the first with its interval, documents."""
    table = Table("domain", "expert", "score", "difference to the base [95 %]", "documents", "set aside", box=None)
    for domain in result.domains:
        aside = str(domain.set_aside["documents"])
        for number_, (expert, row) in enumerate(domain.rows.items()):
            gain = gain_text(row, domain.unit) if number_ else ""
            cells = (domain.name, expert, format_decimals(row.score, 2), gain, str(row.documents), aside)
            table.add_row(*(Text(cell) for cell in cells))
            for name, other in (row.also or {}).items():
                gain = gain_text(other, domain.unit) if number_ else ""
                table.add_row("", Text(f"{expert}, {name}"), format_decimals(other.score, 2), Text(gain), "", "")
    for number_, (expert, row) in enumerate(result.average.items()):
        gain = gain_text(row, "points") if number_ else ""
        name = f"average of {row.domains}"
        table.add_row(*(Text(cell) for cell in (name, expert, format_decimals(row.score, 2), gain, "", "")))
    return table
