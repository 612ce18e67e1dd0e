"""`freemoe report`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from freemoe.cli.common import out, print_json, require_artefact, say

HELP = """Write an artefact's report.html again from its result.json, and print its tables.

Example:

\b
  freemoe report experts
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("report", help=HELP)
    def command(
        artefact: Path = typer.Argument(help="Folder written by freemoe build, demo, convert or trim."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print the tables; write nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print the result as JSON; write nothing."),
    ) -> None:
        require_artefact(artefact)
        from freemoe.evals.held_out import record_text

        result = json.loads((artefact / "result.json").read_text(encoding="utf-8"))
        if as_json:
            print_json(result)
            return
        if result.get("kind") == "converted":
            from freemoe.report.conversion import write_conversion_report as write
            from freemoe.tomoe.card import headlines

            lines = headlines(result)
        elif result.get("kind") == "trimmed-moe":
            from freemoe.cli.trim import print_rows
            from freemoe.hookmoe.card import headlines
            from freemoe.report.trimmed import write_trimmed_report as write

            print_rows(result["test"])
            lines = headlines(result)
        else:
            from freemoe.report.html import write_report as write
            from freemoe.report.tables import subdomain_table, summary_table

            out.print(summary_table(result))
            out.print(subdomain_table(result))
            lines = []
        for line in [*lines, record_text(result.get("seen"))]:
            say(line)
        if not dry_run:
            say(f"report: {write(artefact)}")
