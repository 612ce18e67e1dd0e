from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freemoe.cli import completion, options
from freemoe.cli.common import plain_result, print_json, print_line, print_table
from freemoe.core.artifacts import read_manifest

if TYPE_CHECKING:
    from freemoe.results import EvaluationResult

HELP = """Write the HTML page of a result again, from its JSON alone, and print its tables.

The page of an artefact is report.html in its folder. That of a file which eval -o wrote stands beside it: scores.html for scores.json.

Examples:

\b
  freemoe report experts
  freemoe report scores.json
"""


def run_command(
    artefact: str = typer.Argument(
        help="Folder written by freemoe build, demo, convert or trim, owner/name of the hub, or a JSON file by freemoe "
        "eval -o.",
        autocompletion=completion.complete_artefacts,
    ),
    dry_run: Annotated[bool, options.dry_run_option("Print the tables; write nothing.")] = False,
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON; write nothing."),
) -> None:
    """Run ``freemoe report`` with these options."""
    from freemoe.hub.fetch import fetch_artefact
    from freemoe.results import EvaluationResult, read_result, wrap_display_errors

    file = Path(artefact) if artefact.endswith(".json") and not Path(artefact).is_dir() else None
    if file is not None and isinstance(result := read_result(file), EvaluationResult):
        return _print_evaluation(file, result, dry_run, as_json)
    place = fetch_artefact(artefact if file is None else file.parent, required=True)
    read_manifest(place, check=False)
    result = read_result(place)
    if as_json:
        return print_json("report", {"folder": artefact, "result": plain_result(place)})
    from freemoe.artefacts import write_page
    from freemoe.evals.held_out import record_text
    from freemoe.systems import SYSTEMS

    with wrap_display_errors(place):
        tables, lines = SYSTEMS.get(result.kind).part("report:tables")(result)
    for table in tables:
        print_table(table)
    for line in (*getattr(result, "notes", ()), *lines, record_text(result.seen)):
        print_line(line)
    if not dry_run:
        print_line(f"report: {write_page(place)}")


def _print_evaluation(path: Path, result: EvaluationResult, dry_run: bool, as_json: bool) -> None:
    """The table and the page of an evaluation."""
    if as_json:
        return print_json("eval", plain_result(path))
    from freemoe.report.evaluation import page, page_of
    from freemoe.report.page import write_page
    from freemoe.report.tables import evaluation_table
    from freemoe.results import wrap_display_errors

    with wrap_display_errors(path):
        table = evaluation_table(result)
    print_table(table)
    if not dry_run:
        print_line(f"report: {write_page(path, page, page_of(path))}")
