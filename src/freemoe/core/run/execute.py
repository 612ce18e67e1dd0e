"""How every run that writes an artefact begins and ends: its working folder, then result, card, manifest, publish.

A system's pipeline stands between `open_run` and `publish_run`; what is written where, and when, stands here once.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from freemoe.core.artifacts import write_manifest
from freemoe.core.environment import describe_environment
from freemoe.core.errors import ArtifactError, DiskError, FreeMoEError
from freemoe.core.files import CARD, as_disk_error, write_atomic
from freemoe.core.ledger import count_openings
from freemoe.core.memory import peak_memory_bytes
from freemoe.core.run.folder import RunFolder, strip_if_finished
from freemoe.core.untrusted import dump_yaml, validate_strict
from freemoe.core.version import __version__

R = TypeVar("R", bound=BaseModel)

NOT_DECIDING = ("workers", "place", "unit_seconds", "preset")
"""Fields of a recipe that do not decide what the result is (a preset only fills others): a resumed run may have others."""

RESULT_FORMAT = 1
"""Of ``result.json``; raised when an entry that was there is called otherwise or means something else."""


@dataclass(frozen=True)
class RunOutput:
    """What a run made, beside the tensors that it wrote into its folder."""

    base_fingerprint: str  # Of the base it was made from
    result: dict[str, Any]  # The system's part of ``result.json``
    manifest: dict[str, Any]  # The system's part of the manifest
    seen: dict[str, Any]  # The record of what the making saw, as both tell it
    reported: Iterable[str] = ()  # What each reported document says, for the count of openings
    cost: dict[str, Any] = field(default_factory=dict)  # More to tell of what it cost


def identity_fields(recipe: Any, *others: str) -> dict[str, Any]:
    """The fields of a recipe that decide what the result is, without some others."""
    return {k: v for k, v in recipe.model_dump(mode="json").items() if k not in (*NOT_DECIDING, *others)}


def is_finished(recipe: Any) -> bool:
    """Whether a run of this recipe was killed right after its folder had appeared; what it left there is removed now."""
    return strip_if_finished(recipe.output, identity_fields(recipe))


@contextlib.contextmanager
def open_run(recipe: Any, *, overwrite: bool = False, resume: bool = True) -> Iterator[RunFolder]:
    """The working folder of a recipe's run, for as long as it lasts.

    Raises:
        FreeMoEError: What goes wrong inside; no folder named like the output is left half written.
    """
    run = RunFolder(recipe.output, identity_fields(recipe), overwrite=overwrite, resume=resume)
    try:
        yield run
    except BaseException as error:
        full = as_disk_error(error, run.partial)
        run.discard_if_idle(refused=isinstance(error, FreeMoEError) and not isinstance(error, DiskError))
        if full is not None:
            raise full from error
        raise


def publish_run(
    run: RunFolder,
    typed: type[R],
    recipe: Any,
    output: RunOutput,
    check: Callable[[Path], Any],
    card: Callable[[R], str],
    page: Callable[[Path], Any] | None = None,
) -> Path:
    """Write result, card and manifest of what a run made, and let its folder appear under its name.

    ``check`` opens everything that was written, as its readers do. ``page`` draws `PAGES` into the folder before that appears
    under its name.
    """
    (kind,) = get_args(typed.model_fields["kind"].annotation)
    openings = count_openings(output.reported, [output.base_fingerprint, identity_fields(recipe, "output")])
    result = {
        "format": RESULT_FORMAT,
        "kind": kind,
        "freemoe": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": recipe.model_dump(mode="json"),
        **({"notes": notes} if (notes := recipe.notes()) else {}),
        **output.result,
        "seen": output.seen,
        "environment": describe_environment(),
        "cost": {
            "wall_seconds": time.time() - run.began,
            "peak_memory_bytes": peak_memory_bytes(),
            "units_done": run.journal.done,
            "units_reused": run.journal.reused,
            "openings": openings,
            **output.cost,
        },
    }
    manifest = {
        "kind": kind,
        "freemoe_version": __version__,
        "base_model_name_or_path": recipe.model,
        "revision": recipe.revision,
        "base_fingerprint": output.base_fingerprint,
        **output.manifest,
        "seen": output.seen,
    }
    write_atomic(run.partial / "recipe.yaml", dump_yaml(recipe.model_dump(mode="json")).encode())
    write_atomic(run.partial / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    try:
        write_atomic(run.partial / CARD, card(validate_strict(typed, result, "The result", ArtifactError)).encode())
        write_manifest(run.partial, manifest)
        check(run.partial)
        if page is not None:
            page(run.partial)
    except DiskError:
        raise
    except FreeMoEError as error:
        raise ArtifactError(
            f"What was made stands in {str(run.partial)!r} and is not published, as its own readers refuse it: {error} That is a defect "
            "of freemoe, or of a package that extends it, and no unit of work is lost: once it is mended, run the same command again."
        ) from error
    return run.publish_folder()
