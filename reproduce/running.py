"""Measure the rows of a table: each run once, written at once, shared by all tables that show it.

A record counts only while everything that decided it is as it was: the recipe, its arguments, the function, the versions.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from freemoe.core.environment import describe_environment
from freemoe.core.errors import FreeMoEError, LockedError
from freemoe.core.files import write_atomic
from freemoe.core.run.lock import output_lock
from freemoe.core.run.progress import Progress
from reproduce.protocol import facts_of, name_of, protocol_line
from reproduce.runs import Run, run_of
from reproduce.table import Measured, Row, Scene, Table

log = logging.getLogger(__name__)

DONE, OPEN, FAILED, PAPER_ONLY = "measured", "not measured", "failed", "paper only"


class Records:
    """Finished runs, one JSON file each, and the folders of those that are under way; ``keep`` leaves what a run wrote there."""

    def __init__(self, folder: Path, keep: bool = False) -> None:
        self.folder = folder
        self.keep = keep

    def load(self, run: Run) -> dict[str, Any] | None:
        """The record of a finished run; None where there is none, or one that cannot be read."""
        try:
            return json.loads((self.folder / f"{run.key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def carry_out(self, run: Run, progress: Progress) -> dict[str, Any]:
        """Do a run, or go on with it, and write its record.

        Raises:
            LockedError: Another process is at it.
            FreeMoEError: What the run met; what it has done so far stays for the next try.
        """
        with output_lock(self.folder / f"{run.key}.json"):
            began = time.perf_counter()
            folder = self.folder / run.key
            folder.mkdir(parents=True, exist_ok=True)
            recipe = run.recipe.model_copy(update={"output": str(folder / "out")})
            found = resolve_name(run.work)(recipe, folder, progress, **run.arguments)
            record = {"found": found, "recipe": run.recipe.model_dump(mode="json"), "arguments": run.arguments}
            record |= {"seconds": time.perf_counter() - began, "environment": describe_environment()}
            text = json.dumps(record, allow_nan=True)
            write_atomic(self.folder / f"{run.key}.json", text.encode())
            if not self.keep:
                shutil.rmtree(folder, ignore_errors=True)
            return json.loads(text)


def measure(
    table: Table, scene: Scene, records: Records, progress: Progress, *, only_finished: bool = False
) -> dict[str, Any]:
    """Fill a table: measure the rows that are not measured yet.

    A row that fails says so, and the table goes on. Below the paper's own scale a row of one of the paper's models, or tasks, is
    the paper's alone, and what ran has a row beside it, once.

    Returns:
        ``table``, ``title``, ``scale``, ``columns``, ``protocol``, ``notes``, ``rows``: each with ``label``, ``paper``, ``ours``
        (column -> fields of `Measured`), ``status``, ``why`` and ``seconds``.
    """
    rows: list[dict[str, Any]] = []
    facts: list[dict[str, str]] = []
    shown: set[Any] = set()
    with progress.stage(table.name, len(table.rows)) as advance:
        for row in table.rows:
            rows += _filled(row, table, scene, records, None if only_finished else progress, shown, facts)
            advance(1)
    return {
        "table": table.name,
        "title": table.title,
        "scale": scene.scale,
        "seed": scene.seed,
        "columns": {**table.columns, **table.ours},
        "protocol": protocol_line(facts),
        "notes": table.notes,
        "absent": table.absent,
        "rows": rows,
        "environment": describe_environment(),
    }


def _filled(
    row: Row,
    table: Table,
    scene: Scene,
    records: Records,
    progress: Progress | None,
    shown: set[Any],
    facts: list[dict[str, str]],
) -> list[dict[str, Any]]:
    """One row, and of what ran rows of its own; ``progress`` None measures nothing."""
    empty = {"ours": {}, "why": row.absent, "seconds": 0.0, "status": PAPER_ONLY}
    theirs = {"label": row.name, "paper": dict(row.paper), **empty}
    if not row.recipe or row.way is None:
        return [theirs]
    beside, ours = [], theirs
    try:
        run = run_of(row, table, scene)
        if row.of and scene.scale != "paper":
            beside, ours = (
                [theirs] if row.paper else [],
                {"label": f"{name_of(run, row)}, {row.label}", "paper": {}, **empty},
            )
            if shown & (same := {ours["label"], (run.key, row.pick, row.way)}):
                return beside
            shown |= same
        record = records.load(run)
        if record is None:
            if progress is None:
                facts.append(facts_of(run, {}))
                return [*beside, ours | {"status": OPEN}]
            progress.say(f"{table.name}: {ours['label']}")
            record = records.carry_out(run, progress)
        read: dict[str, Any] = resolve_name(row.way.read)(record["found"], row)
        facts.append(facts_of(run, record["found"]))
    except LockedError as error:
        return [*beside, ours | {"status": OPEN, "why": str(error)}]
    except FreeMoEError as error:
        return [*beside, ours | {"status": FAILED, "why": " ".join(str(error).split())}]
    except Exception as error:  # a row that fails, however it fails, does not cost the others
        log.warning("%s, row %s: %s: %s", table.name, row.label, type(error).__name__, error, exc_info=error)
        return [*beside, ours | {"status": FAILED, "why": f"{type(error).__name__}: {error}"}]
    parts = {ours["label"]: read} if all(isinstance(m, Measured) for m in read.values()) else read
    columns = {**table.columns, **table.ours}
    return beside + [
        {
            **ours,
            "label": label,
            "status": DONE,
            "ours": {column: asdict(m) for column, m in own.items() if column in columns},
            "seconds": record["seconds"],
        }
        for label, own in parts.items()
    ]
