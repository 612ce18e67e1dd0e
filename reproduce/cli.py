"""The command line of `python -m reproduce`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, cast

import typer
from rich.table import Table as Printed

from freemoe.cli import options
from freemoe.cli.common import calm_libraries, out, print_line, print_table, progress_of
from freemoe.cli.options import CODE, GroupedCommand, allowed_code
from freemoe.core.errors import DataError, RecipeError
from freemoe.core.registry import unknown_name
from freemoe.recipes import dump
from reproduce.protocol import needs_line
from reproduce.running import FAILED, Records, measure
from reproduce.runs import run_of
from reproduce.table import PAPERS, SCALES, ScaleName, Scene, Table, all_tables, find
from reproduce.writing import LABEL, blocks, grid, heading, notes, save

HELP = """Run a paper's table or figure: the paper's numbers and ours side by side, and how the protocols differ.

Every row is measured once and kept below --output; what was stopped goes on when the command is given again. --list
says what there is, and what is not there. Exit code 1 when a row fails; the other rows are measured. check measures nothing: it
compares metric, shots, split and length of every column at the scale paper with what the paper says, and exits 1 on a difference.

Examples:

\b
  python -m reproduce mode/table03
  python -m reproduce all --scale tiny --minutes 60
  python -m reproduce mode --scale small --model model.gguf --data-root ./data
  python -m reproduce mode/table03 --scale paper --dry-run
  python -m reproduce check
"""


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=HELP, cls=GroupedCommand)
def _command(
    names: list[str] = typer.Argument(
        None,
        help=f"Tables, e.g. mode/table03; {', '.join(PAPERS)} for all of a paper; all; or check.",
    ),
    listing: bool = typer.Option(False, "--list", help="Name every table, and what of it runs; do nothing."),
    scale: str = typer.Option(
        "tiny",
        help="; ".join(f"{name}: {about}" for name, about in SCALES.items()) + ".",
    ),
    model: str = typer.Option(None, "--model", help="Base: folder, GGUF file or hub id; small needs one."),
    data_root: Path = typer.Option(None, envvar="FREEMOE_DATA", help="Folder with real benchmark files."),
    output: Path = typer.Option(Path("reproduce-out"), "--output", "-o", help="Folder for runs and filled tables."),
    limit: int = typer.Option(None, min=1, help="Documents or blocks per task; the scale's own number if absent."),
    minutes: float = typer.Option(None, min=0, help="Begin no further table after so many minutes."),
    allow_code_execution: str = typer.Option(
        None,
        CODE,
        help="Run programs that the model writes, in the sandbox; =unsafe: even where bubblewrap does not start.",
    ),
    keep: bool = typer.Option(False, "--keep", help="Keep what every run wrote: artefacts and reports."),
    seed: int = typer.Option(0, min=0, help="Of splits, masks and training."),
    threads: int = typer.Option(None, min=1, help="CPU threads."),
    profile: str = typer.Option(
        None, help="Of every recipe: paper, or another that it has; below the scale paper its own is often another."
    ),
    device: str = typer.Option(None, help="auto, cpu, cuda, cuda:N, split, disk; the recipe's own if absent."),
    dtype: str = typer.Option(None, help="Number format of the base; the recipe's own if absent."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would run and what is done; measure nothing."),
    print_recipes: bool = typer.Option(False, "--print-recipes", help="Print the recipe of every row; do nothing."),
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    if listing:
        _tell_all(as_json)
        return
    if names == ["check"]:
        _check(as_json)
    if not names:
        raise RecipeError(f"Which tables? One by its name (--list names them), {', '.join(PAPERS)}, or all.")
    if scale not in SCALES:
        raise unknown_name("scale", scale, list(SCALES))
    if data_root is not None and not data_root.expanduser().is_dir():
        raise DataError(f"No folder at {data_root.expanduser().absolute()} (--data-root). Check the path.")
    tables, root = find(names), data_root.expanduser() if data_root else None
    where = (cast(ScaleName, scale), model, root, limit, seed, threads, allowed_code(allow_code_execution))
    scene = Scene(*where, profile, device, dtype)
    if print_recipes:
        _print_recipes(tables, scene)
        return
    from freemoe.core.ledger import keep_none

    calm_libraries()
    keep_none()
    needs = {t.name: needs_line(t, scene) for t in tables if t.runs} if scale == "paper" else {}
    for name, line in {} if as_json else needs.items():
        print_line(f"{name} takes {line}")
    _reproduce(tables, scene, Records(output.expanduser() / "runs", keep), needs, minutes, dry_run, as_json, quiet)


def _tell_all(as_json: bool) -> None:
    rows = [{"name": t.name, "about": t.title, "what_runs": t.status()} for t in all_tables().values()]
    lines = [f"{row['name']:20} {row['about']}: {row['what_runs']}" for row in rows]
    print_line(json.dumps({"tables": rows}) if as_json else "\n".join(lines))


def _check(as_json: bool) -> None:
    """Say where what ours measures at the paper's own scale is not what the paper says; those with a note count for nothing."""
    from reproduce.check import differences

    found = [(t, column, said) for t in all_tables().values() for column, said in differences(t).items()]
    silent = [f"{t.name}, {column}: {said}" for t, column, said in found if column not in t.differs]
    lines = [*silent, f"{len(silent)} differences without a note; {len(found) - len(silent)} with one"]
    as_data = {"differences": silent, "with_a_note": len(found) - len(silent)}
    print_line(json.dumps(as_data) if as_json else "\n".join(lines))
    raise typer.Exit(1 if silent else 0)


def _print_recipes(tables: list[Table], scene: Scene) -> None:
    shown: set[str] = set()
    for table in tables:
        for row in table.runs:
            run = run_of(row, table, scene)
            if run.key not in shown:
                shown.add(run.key)
                print_line(f"# {table.name}: {row.label}\n{dump(run.recipe)}---")


def _reproduce(
    tables: list[Table],
    scene: Scene,
    records: Records,
    needs: dict[str, str],
    minutes: float | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    end = None if minutes is None else time.monotonic() + 60 * minutes
    filled: list[dict[str, Any]] = []
    files: dict[str, dict[str, str]] = {}
    for table in tables:
        late = end is not None and time.monotonic() > end
        found = measure(table, scene, records, progress_of(quiet), only_finished=dry_run or late)
        filled.append(found)
        if not dry_run and not table.absent:
            files[table.name] = {kind: str(path) for kind, path in save(found, table, records.folder.parent).items()}
        if not as_json:
            _tell(found, table, files.get(table.name, {}))
    if as_json:
        print_line(json.dumps({"tables": filled, "needs": needs, "files": files}))
    else:
        _tell_sum(filled)
    raise typer.Exit(1 if any(row["status"] == FAILED for found in filled for row in found["rows"]) else 0)


def _tell(found: dict[str, Any], table: Table, files: dict[str, str]) -> None:
    if table.absent:
        print_line(f"{heading(found)}: not there: {table.absent}")
        return
    print_line(heading(found))
    if not table.picture_alone:
        header, rows = grid(found)
        for columns in blocks(header, rows, out.width):
            printed = Printed()
            for number in (0, *columns):
                printed.add_column(header[number], no_wrap=number > 0, max_width=None if number else LABEL)
            for row in rows:
                if any(row[number] for number in columns):
                    printed.add_row(*(row[number] for number in (0, *columns)))
            print_table(printed)
    for line in notes(found):
        print_line(line)
    for kind, path in files.items():
        if kind != "json":
            print_line(f"{kind}: {path}")


def _tell_sum(filled: list[dict[str, Any]]) -> None:
    whole = sum(all(row["status"] != FAILED for row in table["rows"]) for table in filled)
    rows = [row for table in filled for row in table["rows"]]
    counts = {status: sum(r["status"] == status for r in rows) for status in dict.fromkeys(r["status"] for r in rows)}
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    print_line(f"{len(filled)} tables and figures, {whole} without a failure; rows: {said or 'none'}")
