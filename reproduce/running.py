"""Measure the rows of a table: each run once, written at once, shared by all tables that show it.

A record counts only while everything that decided it is as it was: the recipe, its arguments, the function, the versions.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from freemoe.core.environment import DECIDING, describe_environment, package_versions
from freemoe.core.errors import FreeMoEError, LockedError
from freemoe.core.files import json_digest, write_atomic
from freemoe.core.run.lock import output_lock
from freemoe.core.run.progress import Progress
from freemoe.recipes import Recipe, recipe_from, set_path
from reproduce.table import Measured, Row, Scene, Table, Way, load_function

log = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"
DONE, OPEN, FAILED, PAPER_ONLY = "measured", "not measured", "failed", "paper only"


@dataclass(frozen=True)
class Run:
    """What a row asks to be done.

    Attributes:
        recipe: Checked, cut down to the scale; its output is a placeholder.
        work: Path of the function that does it.
        arguments: More of its keyword arguments.
    """

    recipe: Recipe
    work: str
    arguments: dict[str, Any]

    @property
    def key(self) -> str:
        """Its identity: equal runs of different tables are one."""
        fields = self.recipe.model_dump(mode="json", exclude={"output", "threads", "preset"})
        return json_digest([self.work, fields, self.arguments, package_versions(DECIDING)])


def run_of(row: Row, way: Way, scene: Scene) -> Run:
    """The run of a row at a scale.

    Raises:
        RecipeError: When the row's recipe cannot be used at that scale.
    """
    data = yaml.safe_load((RECIPES / f"{row.recipe}.yaml").read_text(encoding="utf-8"))
    for path, value in row.changes.items():
        set_path(data, path, value)
    data = load_function(way.scaled)(data, scene)
    arguments = {**data.pop("arguments", {}), **row.arguments}
    data |= {"seed": scene.seed, "threads": scene.threads, "output": "run"}
    asked = {"device": scene.device, "dtype": scene.dtype, "profile": scene.profile}
    data |= {name: value for name, value in asked.items() if value is not None}
    return Run(recipe_from(data, f"{row.recipe} at scale {scene.scale}"), way.work, arguments)


class Records:
    """Finished runs, one JSON file each, and the folders of those that are under way.

    Args:
        folder: Made when the first record is written.
        keep: Leave what a run wrote (artefacts, reports) beside its record.
    """

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
            return self._carried_out(run, progress)

    def _carried_out(self, run: Run, progress: Progress) -> dict[str, Any]:
        began = time.perf_counter()
        folder = self.folder / run.key
        folder.mkdir(parents=True, exist_ok=True)
        recipe = run.recipe.model_copy(update={"output": str(folder / "out")})
        found = load_function(run.work)(recipe, folder, progress, **run.arguments)
        fields = run.recipe.model_dump(mode="json")
        record = {"found": found, "recipe": fields, "arguments": run.arguments, "seconds": time.perf_counter() - began}
        text = json.dumps(record | {"environment": describe_environment()}, allow_nan=True)
        write_atomic(self.folder / f"{run.key}.json", text.encode())
        if not self.keep:
            shutil.rmtree(folder, ignore_errors=True)
        return json.loads(text)


def measure(
    table: Table, scene: Scene, records: Records, progress: Progress, *, only_finished: bool = False
) -> dict[str, Any]:
    """Fill a table: measure the rows that are not measured yet.

    A row that fails says so, and the table goes on.

    Args:
        table: With something that runs.
        scene: Where.
        records: Finished runs.
        progress: Where to report.
        only_finished: Measure nothing; fill in what is there.

    Returns:
        ``table``, ``title``, ``scale``, ``columns``, ``protocol``, ``approximated``, ``rows``: each with ``label``, ``paper``,
        ``ours`` (column -> fields of `Measured`), ``status``, ``why`` and ``seconds``.
    """
    rows = []
    with progress.stage(table.name, len(table.rows)) as advance:
        for row in table.rows:
            rows.append(_filled(row, table, scene, records, None if only_finished else progress))
            advance(1)
    return {
        "table": table.name,
        "title": table.title,
        "scale": scene.scale,
        "seed": scene.seed,
        "columns": dict(table.columns),
        "protocol": table.protocol,
        "approximated": table.approximated.get(scene.scale, "").replace("{profile}", scene.profile or "default"),
        "absent": table.absent,
        "rows": rows,
        "environment": describe_environment(),
    }


def _filled(row: Row, table: Table, scene: Scene, records: Records, progress: Progress | None) -> dict[str, Any]:
    """One row; ``progress`` None measures nothing."""
    shown = {"label": row.label, "paper": dict(row.paper), "ours": {}, "why": row.absent, "seconds": 0.0}
    if not row.recipe:
        return shown | {"status": PAPER_ONLY}
    try:
        way = table.way_of(row)
        run = run_of(row, way, scene)
        record = records.load(run)
        if record is None:
            if progress is None:
                return shown | {"status": OPEN}
            progress.say(f"{table.name}: {row.label}")
            record = records.carry_out(run, progress)
        ours: dict[str, Measured] = load_function(way.read)(record["found"], row)
    except LockedError as error:
        return shown | {"status": OPEN, "why": str(error)}
    except FreeMoEError as error:
        return shown | {"status": FAILED, "why": " ".join(str(error).split())}
    except Exception as error:  # a row that fails, however it fails, does not cost the others
        log.warning("%s, row %s: %s: %s", table.name, row.label, type(error).__name__, error, exc_info=error)
        return shown | {"status": FAILED, "why": f"{type(error).__name__}: {error}"}
    kept = {column: asdict(value) for column, value in ours.items() if column in table.columns}
    return shown | {"status": DONE, "ours": kept, "seconds": record["seconds"]}
