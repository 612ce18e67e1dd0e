"""`freemoe report`."""

from __future__ import annotations

from pathlib import Path

import typer

from freemoe.cli import completion
from freemoe.cli.common import print_json, print_table, require_artefact, say

HELP = """Write an artefact's report.html again from its result.json, and print its tables.

Example:

\b
  freemoe report experts
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("report", help=HELP)
    def command(
        artefact: Path = typer.Argument(
            help="Folder written by freemoe build, demo, convert or trim.", autocompletion=completion.artefacts
        ),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print the tables; write nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print the result as JSON; write nothing."),
    ) -> None:
        require_artefact(artefact)
        from freemoe.evals.held_out import record_text
        from freemoe.results import read_result
        from freemoe.systems import system_of

        result = read_result(artefact)
        if as_json:
            print_json("report", {"folder": artefact, "result": result})
            return
        system = system_of(artefact)
        assert system is not None
        tables, lines = system.tables(result)
        for table in tables:
            print_table(table)
        for line in [*lines, record_text(result.get("seen"))]:
            say(line)
        if not dry_run:
            say(f"report: {system.page(artefact)}")
