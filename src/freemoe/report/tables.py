"""Plain tables of a result for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from freemoe.core.numbers import format_decimals
from freemoe.domain_experts.prove.card import ROWS, gain_text
from freemoe.report.reading import format_number, format_percent, gain_words
from freemoe.results import BuildResult, EvaluationResult

_ROW_STYLES = {"base": "dim", "expert": "bold", "routed": "bold", "control": "", "oracle": "dim italic"}
_ROW_NAMES = {"oracle": "oracle (selected on test)", "control": "control (random weights)"}


def summary_table(result: BuildResult) -> Table:
    """Every domain's rows: score, paired gain over the base with its 95 % interval, documents won and lost."""
    table = Table(title="Held-out documents: score and paired difference to the base", title_justify="left")
    for column in ("domain", "row"):
        table.add_column(column)
    for column in ("score", "gain [95 %]", "won/lost", "documents"):
        table.add_column(column, justify="right")
    for domain in result.domains:
        text = domain.is_text
        unit = "perplexity, x of base" if text else f"{domain.metric} %, points"
        kept = f"{len(domain.accepted)} of {len(domain.subdomains)} subdomains have an expert"
        first = [f"{domain.name} ({unit})", kept]
        for name in ROWS:
            row = domain.rows.get(name)
            if row is None:
                continue
            won = f"{row.won}/{row.lost}" if row.won is not None and name != "base" else ""
            # Text, not str: a user's name, and an interval's brackets, are no markup.
            cells = (
                first.pop(0) if first else "",
                _ROW_NAMES.get(name, name),
                format_number(row.score),
                "" if name == "base" else gain_words(row, text),
                won,
                str(row.documents),
            )
            table.add_row(*(Text(cell) for cell in cells), style=_ROW_STYLES[name])
        table.add_section()
    return table


def subdomain_table(result: BuildResult) -> Table:
    """Every subdomain: documents, what was chosen, how much is off, score before and after, and the guard's verdict."""
    table = Table(title="Subdomains and the guard's verdicts", title_justify="left")
    for column in ("subdomain", "chosen"):
        table.add_column(column)
    for column in ("off %", "documents", "base", "expert", "gain [95 %]"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for domain in result.domains:
        text = domain.is_text
        for sub in domain.subdomains:
            base, expert = sub.rows.get("base"), sub.rows.get("expert")
            cells = (
                sub.name,
                sub.chosen,
                format_percent(sub.off_share),
                str(base.documents) if base else "0",
                format_number(base.score) if base else "–",
                format_number(expert.score) if expert else "–",
                gain_words(expert, text) if expert and sub.chosen != "base" else "–",
                sub.verdict,
            )
            table.add_row(*(Text(cell) for cell in cells), style="dim" if sub.chosen == "base" else "")
        table.add_section()
    return table


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of cells that are text already."""
    shown = Table(*header, box=None)
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown


def compared_table(rows: list[dict[str, Any]]) -> Table:
    """Plans and rules per token beside each other, without hooks."""
    cells = [
        (row["name"], f"{row['act']:.3f}", f"{row['loss']:.4f}", f"{row['kl']:.4f}", f"{row['accuracy']:.2f} %")
        for row in rows
    ]
    return plain_table(("plan or rule", "Act", "loss", "KL", "next token right"), cells)


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
