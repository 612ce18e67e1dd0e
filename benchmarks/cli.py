"""The command line of `python -m benchmarks`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness import (
    BENCHES,
    HARDENING,
    ON_DEVICES,
    SIDE_BY_SIDE,
    Settings,
    listing,
    missed,
    run_bench,
    save_result,
)
from freemoe.cli import options
from freemoe.cli.common import calm_libraries, print_line, progress_of
from freemoe.core.errors import DataError, RecipeError
from freemoe.core.run.places import ExecutorSpec, parse_executor_spec

HELP = """Measure what freemoe promises: one line per figure, its target beside it; exit code 1 when one is missed.

Every benchmark measures both sides in one process, in turns, and prints the ratio. Run it on a quiet machine.

Examples:

\b
  python -m benchmarks scorer
  python -m benchmarks gain --data-root ./data
  python -m benchmarks real --model MODEL --data-root ./data --list
  python -m benchmarks real --model MODEL --data-root ./data --only "text/wikitext/*" --minutes 60
  python -m benchmarks real --papers --model MODEL --data-root ./data
  python -m benchmarks rivals --data-root ./data --only "*/lora*,*/switches*,*/base/*"
  python -m benchmarks all --quick
"""

ALL = "all"
_BY_CELLS = "real, papers, rivals, tomoe-quality"
_ONLY = (
    f"Measure parts of these names only: cells of {_BY_CELLS} ('*/wikitext/*'), parts of large and hookmoe, masks of tomoe-speed, "
    "bases of mixed ('135M*')."
)

_MINUTES = f"{_BY_CELLS}, null: begin no cell after so many minutes."

NEEDS_MODEL, NEEDS_DEVICE = ("real", "papers"), ("large",)
"""Benchmarks that ``all`` leaves out: while no model is given; always, as their base has 7B."""


def names_of(asked: list[str], model: str | None = None, papers: bool = False) -> list[str]:
    """The benchmarks that were asked for, each once, in order; ``all`` leaves out those that need a ``model``.

    ``real-llm`` is another name of `real`, whose part ``papers`` is a benchmark of its own.
    """
    real = "papers" if papers else "real"
    asked = [real if name in ("real", "real-llm") else name for name in asked]
    for name in asked:
        if name in HARDENING:
            raise RecipeError(
                f"{name} is a test now: python -m pytest tests/hardening/{name} -m hardening (docs/benchmarks.md)."
            )
        if name != ALL:
            BENCHES.get(name)
    left_out = NEEDS_DEVICE if model else (*NEEDS_MODEL, *NEEDS_DEVICE)
    return [n for n in BENCHES if n in asked or (ALL in asked and n not in left_out)]


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=HELP)
def _command(
    names: list[str] = typer.Argument(help=f"{', '.join(BENCHES)}; or all."),
    output: Path = typer.Option(Path("bench-out"), "--output", "-o", help="Folder for one JSON file per benchmark."),
    data_root: Path = typer.Option(
        None, envvar="FREEMOE_DATA", help="Folder with real benchmark files and models, for gain."
    ),
    model: str = typer.Option(
        None, "--model", help="A base to measure on, for benchmarks that can take one; real needs it."
    ),
    cells: Path = typer.Option(
        None, help=f"{_BY_CELLS}, hookmoe: folder of what is finished and never measured twice."
    ),
    only: str = typer.Option(None, help=_ONLY),
    minutes: float = typer.Option(None, min=0, help=_MINUTES),
    papers: bool = typer.Option(False, "--papers", help="real: each paper's own method instead of ours (papers)."),
    place: str = typer.Option(
        "local", "--on", help=f"local, local:N, ray or ray://HOST:PORT; for {', '.join(SIDE_BY_SIDE)}."
    ),
    workers: int = typer.Option(1, min=1, help="Cells that are measured side by side (--on)."),
    device: str = typer.Option("cpu", help=f"cpu, cuda, cuda:N or auto; for {', '.join(ON_DEVICES)}."),
    list_cells: bool = typer.Option(False, "--list", help="real, rivals: name the cells with their time; do nothing."),
    quick: bool = typer.Option(False, "--quick", help="Small sizes: shows that it runs, judges nothing."),
    repeats: int = typer.Option(5, min=1, help="Times each side is measured."),
    seed: int = typer.Option(0, min=0, help="Seed of shapes and draws."),
    threads: int = typer.Option(None, min=1, help="CPU threads."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be measured; do nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
    quiet: options.Quiet = False,
) -> None:
    wanted = names_of(names, model, papers)
    if dry_run:
        _tell_plan(wanted, as_json)
        return
    if data_root is not None and not data_root.expanduser().is_dir():
        raise DataError(f"No folder at {data_root.expanduser().resolve()} (--data-root). Check the path.")
    here = _side_by_side(place, workers, wanted)
    where = _place(device, wanted)
    calm_libraries()
    _use_threads(threads)
    settings = Settings(
        quick=quick,
        seed=seed,
        repeats=repeats,
        data_root=data_root.expanduser() if data_root else None,
        model=model,
        cells=cells.expanduser() if cells else None,
        only=only,
        minutes=minutes,
        place=here,
        device=where,
        progress=progress_of(quiet),
    )
    if list_cells:
        _list_cells(wanted, settings, as_json)
    else:
        _run(wanted, settings, output, as_json)


def _tell_plan(wanted: list[str], as_json: bool) -> None:
    plan = {name: BENCHES.about(name) for name in wanted}
    lines = [json.dumps({"benchmarks": plan})] if as_json else [f"{name}: {about}" for name, about in plan.items()]
    for line in lines:
        print_line(line)


def _use_threads(threads: int | None) -> None:
    """Have so many CPU threads, here and in the processes that a benchmark starts."""
    if threads:
        from freemoe.core.environment import use_threads

        use_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _side_by_side(text: str, workers: int, wanted: list[str]) -> ExecutorSpec:
    """Where cells are measured.

    Raises:
        RecipeError: It is no place, or benchmarks are asked for that run in this process.
    """
    place = parse_executor_spec(text, workers)
    others = [name for name in wanted if name not in SIDE_BY_SIDE]
    if place.is_parallel and others:
        raise RecipeError(
            f"--on and --workers are for {' and '.join(SIDE_BY_SIDE)}, whose cells can be measured side by side; "
            f"{', '.join(others)} would measure how workers disturb each other."
        )
    return place


def _place(device: str, wanted: list[str]) -> str:
    """The device by its own name.

    Raises:
        RecipeError: Unknown, not there, or for benchmarks that do not go there.
    """
    if device == "cpu":
        return device
    others = [name for name in wanted if name not in ON_DEVICES]
    refusal = f"--device {device}: {', '.join(others)} run on a CPU only; on other devices: {', '.join(ON_DEVICES)}."
    # Before anything is said of what the machine has, which does not matter to those.
    if others and not device.startswith(("cpu", "auto")):
        raise RecipeError(refusal)
    from freemoe.models.checkpoints.placement import pick_device

    place = pick_device(device)
    if others and place.type != "cpu":
        raise RecipeError(refusal)
    if place.type not in ("cpu", "cuda"):
        raise RecipeError(f"--device {device}: benchmarks run on cpu and cuda.")
    return str(place)


def _run(wanted: list[str], settings: Settings, output: Path, as_json: bool) -> None:
    from freemoe.core.ledger import keep_none
    from freemoe.core.run.lock import output_lock

    keep_none()
    results: list[dict[str, Any]] = []
    for name in wanted:
        with output_lock(output / f"{name}.json"):
            found = run_bench(name, settings)
            save_result(found, output)
        results.append(found)
        for figure in () if as_json else found["figures"]:
            print_line(figure["line"])
    if as_json:
        print_line(json.dumps({"results": results}))
    raise typer.Exit(1 if missed(results) else 0)


def _list_cells(wanted: list[str], settings: Settings, as_json: bool) -> None:
    rows = [row for name in wanted for row in listing(name, settings)]
    missing = sum(row["seconds"] for row in rows if not row["done"])
    if as_json:
        print_line(json.dumps({"cells": rows, "missing_seconds": missing}))
        return
    for row in rows:
        print_line(f"{'done' if row['done'] else '-':4} {row['seconds'] / 60:7.1f} min  {row['name']}")
    print_line(f"     {missing / 60:7.1f} min  missing, about")
