"""The skeleton of every run that writes an artefact: folder, steps, result, card, manifest, publish.

A system brings its recipe, its steps and its card; what is written where, and when, stands here once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from freemoe.core.artifacts import write_manifest
from freemoe.core.environment import environment
from freemoe.core.errors import ArtifactError, DiskError, FreeMoEError
from freemoe.core.files import CARD, as_disk_error, write_atomic
from freemoe.core.ledger import count_openings
from freemoe.core.memory import peak_memory_bytes
from freemoe.core.run.folder import RunFolder, finished
from freemoe.core.run.progress import Progress, default_progress
from freemoe.core.version import __version__

NOT_DECIDING = ("workers", "place", "unit_seconds", "preset")
"""Fields of a recipe that do not decide what the result is (a preset only fills others): a resumed run may have others."""

RESULT_FORMAT = 1
"""Of ``result.json``; raised when an entry that was there is called otherwise or means something else."""


class Fields(Protocol):
    """Whatever has fields."""

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """The recipe as plain data."""
        ...


class Recipe(Fields, Protocol):
    """What the skeleton reads of a recipe."""

    @property
    def model(self) -> str:
        """The base."""
        ...

    @property
    def revision(self) -> str | None:
        """Of the base's repository."""
        ...

    @property
    def output(self) -> str:
        """The folder to write."""
        ...

    def notes(self) -> list[str]:
        """What the result must say of its size."""
        ...


@dataclass(frozen=True)
class Made:
    """What the steps of a run leave, beside the tensors that they wrote into its folder.

    Attributes:
        base_fingerprint: Of the base it was made from.
        result: The system's part of ``result.json``.
        manifest: The system's part of the manifest.
        seen: The record of what the making saw, as both tell it.
        reported: What each reported document says, for the count of openings.
        cost: More to tell of what it cost.
    """

    base_fingerprint: str
    result: dict[str, Any]
    manifest: dict[str, Any]
    seen: dict[str, Any]
    reported: Iterable[str] = ()
    cost: dict[str, Any] = field(default_factory=dict)


def deciding(recipe: Fields, *others: str) -> dict[str, Any]:
    """The fields of a recipe that decide what the result is, without some others."""
    return {k: v for k, v in recipe.model_dump(mode="json").items() if k not in (*NOT_DECIDING, *others)}


def carry_out(
    kind: str,
    recipe: Recipe,
    spelled: str,
    steps: Callable[[RunFolder, Progress], Made],
    check: Callable[[Path], Any],
    card: Callable[[dict[str, Any]], str],
    *,
    page: Callable[[Path], Any] | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    resume: bool = True,
) -> Path:
    """Run the steps in a folder that appears under its name when all is written.

    Args:
        kind: What the artefact is.
        recipe: Everything that decides the result.
        spelled: The recipe as YAML.
        steps: Do the work, and write tensors into the run's working folder.
        check: Opens everything that was written, as its readers do: what they refuse is not published.
        card: The model card, from the result.
        page: Draws `PAGES` into the folder that it is given, before that appears under its name.
        progress: Where to report.
        overwrite: Replace a finished artefact of the same name.
        resume: Go on with an unfinished run of the same recipe.

    Returns:
        The artefact's folder.

    Raises:
        FreeMoEError: What the steps raise, or the readers; no folder named like the output is left half written.
    """
    started = time.time()
    identity = deciding(recipe)
    if resume and finished(recipe.output, identity):
        return Path(recipe.output)
    run = RunFolder(recipe.output, identity, overwrite=overwrite, resume=resume)
    try:
        made = steps(run, progress or default_progress())
        _write(kind, recipe, spelled, made, card, run, started)
        _require_readable(run.partial, check, page)
        return run.publish()
    except BaseException as error:
        full = as_disk_error(error, run.partial)
        run.discard_if_idle(refused=isinstance(error, FreeMoEError) and not isinstance(error, DiskError))
        if full is not None:
            raise full from error
        raise


def _write(
    kind: str,
    recipe: Recipe,
    spelled: str,
    made: Made,
    card: Callable[[dict[str, Any]], str],
    run: RunFolder,
    started: float,
) -> None:
    """Write result, card and manifest of what the steps made."""
    openings = count_openings(made.reported, [made.base_fingerprint, deciding(recipe, "output")])
    result = {
        "format": RESULT_FORMAT,
        "kind": kind,
        "freemoe": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": recipe.model_dump(mode="json"),
        **({"notes": notes} if (notes := recipe.notes()) else {}),
        **made.result,
        "seen": made.seen,
        "environment": environment(),
        "cost": {
            "wall_seconds": time.time() - started,
            "peak_memory_bytes": peak_memory_bytes(),
            "units_done": run.journal.done,
            "units_reused": run.journal.reused,
            "openings": openings,
            **made.cost,
        },
    }
    manifest = {
        "kind": kind,
        "freemoe_version": __version__,
        "base_model_name_or_path": recipe.model,
        "revision": recipe.revision,
        "base_fingerprint": made.base_fingerprint,
        **made.manifest,
        "seen": made.seen,
    }
    write_atomic(run.partial / "recipe.yaml", spelled.encode())
    write_atomic(run.partial / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    write_atomic(run.partial / CARD, card(result).encode())
    write_manifest(run.partial, manifest)


def _require_readable(folder: Path, check: Callable[[Path], Any], page: Callable[[Path], Any] | None) -> None:
    """Raise unless the readers of a folder take it; where they do, its pages are drawn."""
    try:
        check(folder)
        if page is not None:
            page(folder)
    except DiskError:
        raise
    except FreeMoEError as error:
        raise ArtifactError(
            f"What was made stands in {str(folder)!r} and is not published, as its own readers refuse it: {error} That is a defect "
            "of freemoe, or of a package that extends it, and no unit of work is lost: once it is mended, run the same command again."
        ) from error
