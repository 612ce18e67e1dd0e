"""`freemoe report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from freemoe.cli import completion
from freemoe.cli.common import print_json, print_table, require_artefact, say

HELP = """Write the HTML page of a result again, from its JSON alone, and print its tables.

The page of an artefact is report.html in its folder. That of a file which eval -o wrote stands beside it: scores.html for scores.json.

Examples:

\b
  freemoe report experts
  freemoe report scores.json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("report", help=HELP)
    def command(
        artefact: str = typer.Argument(
            help="Folder written by freemoe build, demo, convert or trim, owner/name of the hub, or a JSON file by freemoe "
            "eval -o.",
            autocompletion=completion.artefacts,
        ),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print the tables; write nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print the result as JSON; write nothing."),
    ) -> None:
        from freemoe.hub.fetch import fetch_artefact
        from freemoe.results import read_result, shown

        file = Path(artefact) if artefact.endswith(".json") and not Path(artefact).is_dir() else None
        if file is not None and (result := read_result(file)).get("kind") == "evaluation":
            _evaluation(file, result, dry_run, as_json)
            return
        place = fetch_artefact(artefact if file is None else file.parent, required=True)
        require_artefact(place)
        from freemoe.evals.held_out import record_text
        from freemoe.systems import system_of

        result = read_result(place)
        if as_json:
            print_json("report", {"folder": artefact, "result": result})
            return
        system = system_of(place)
        assert system is not None
        with shown(place):
            tables, lines = system.tables(result)
            lines = [*result.get("notes", ()), *lines, record_text(result.get("seen"))]
        for table in tables:
            print_table(table)
        for line in lines:
            say(line)
        if not dry_run:
            say(f"report: {system.page(place)}")


def _evaluation(path: Path, result: dict[str, Any], dry_run: bool, as_json: bool) -> None:
    """The table and the page of an evaluation."""
    from freemoe.report.evaluation import write_evaluation_report
    from freemoe.report.tables import evaluation_table
    from freemoe.results import shown

    if as_json:
        print_json("eval", result)
        return
    with shown(path):
        table = evaluation_table(result)
    print_table(table)
    if not dry_run:
        say(f"report: {write_evaluation_report(path)}")
