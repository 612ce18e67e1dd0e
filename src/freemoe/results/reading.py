"""A result from its file, held against its type: what is not what the schema says is never shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import ValidationError

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError, FreeMoEError
from freemoe.core.files import MANIFEST
from freemoe.core.run.execute import RESULT_FORMAT
from freemoe.core.untrusted import faults_text, read_json
from freemoe.results.common import RunResult
from freemoe.results.evaluation import EvaluationResult
from freemoe.systems import SYSTEMS

R = TypeVar("R", bound="RunResult | EvaluationResult")

_ADVICE = "It was cut short or edited: copy the artefact again or make it anew."


@overload
def read_result(folder: str | Path) -> Any: ...
@overload
def read_result(folder: str | Path, wanted: type[R]) -> R: ...
def read_result(folder: str | Path, wanted: Any = None) -> Any:
    """The ``result.json`` of a folder, or that file itself, or the result that ``freemoe eval`` wrote.

    What a newer freemoe wrote beside under the same format is left out.

    Raises:
        ArtifactError: There is none, it is damaged or not what its type says, of another kind than the artefact or the type, or a
            newer freemoe wrote it.
    """
    path = Path(folder)
    path = path if path.suffix == ".json" and not path.is_dir() else path / "result.json"
    found = _read_result_file(path)
    kind = found.get("kind")
    if (Path(folder) / MANIFEST).is_file() and kind != (told := read_manifest(folder, check=False).get("kind")):
        raise ArtifactError(
            f"The result of {str(folder)!r} is of kind {kind!r}, and its artefact is {told!r}. {_ADVICE}"
        )
    known = {name: SYSTEMS.get(name).result_type for name in SYSTEMS} | {"evaluation": EvaluationResult}
    typed = known.get(kind) if isinstance(kind, str) else None
    if typed is None:
        raise ArtifactError(
            f"The result of {str(folder)!r} is of kind {kind!r}, which this freemoe does not know; it knows "
            f"{', '.join(known)}. Install the freemoe that wrote it."
        )
    if wanted not in (None, typed):
        needed = next(name for name, other in known.items() if other is wanted)
        raise ArtifactError(f"The result of {str(folder)!r} is of kind {kind!r}, and {needed!r} is needed.")
    while True:
        try:
            # From JSON, where a list may be a tuple, but a text no number.
            return typed.model_validate_json(json.dumps(found), strict=True)
        except ValidationError as error:
            faults = error.errors()
            if wrong := [fault for fault in faults if fault["type"] != "extra_forbidden"]:
                raise ArtifactError(
                    f"The result of {str(folder)!r} is not whole: {faults_text(wrong)} {_ADVICE}"
                ) from None
            for fault in faults:
                *place, key = fault["loc"]
                held: Any = found
                for step in place:
                    held = held[step]
                del held[key]


def _read_result_file(path: Path) -> dict[str, Any]:
    """A result file as plain data."""
    if not path.is_file():
        near = path.parent.parent / f"{path.parent.name}.partial"
        hint = f" An unfinished run stands at {str(near)!r}: run its command again first." if near.exists() else ""
        raise ArtifactError(f"{str(path)!r} is not a file; the folder of a finished run is needed.{hint}")
    try:
        found = read_json(path, ArtifactError, finite=False)
    except ArtifactError as error:
        raise ArtifactError(f"{str(path)!r} is damaged: {error} Copy the artefact again or make it anew.") from None
    if not isinstance(found, dict):
        raise ArtifactError(
            f"{str(path)!r}: a result is a mapping, got {type(found).__name__}. Make the artefact anew."
        )
    written = found.get("format")
    if isinstance(written, int) and written > RESULT_FORMAT:
        raise ArtifactError(
            f"{str(path)!r} is of format {written}, and this freemoe reads up to {RESULT_FORMAT}. Install the freemoe that "
            f"wrote it ({found.get('freemoe', 'unknown')})."
        )
    return found


@contextmanager
def wrap_display_errors(source: str | Path) -> Iterator[None]:
    """Around what shows a result: its open parts (``recipe``, ``environment``, ``plan`` ...) have no type that could be checked.

    Raises:
        ArtifactError: Something that is shown is not there, or is no number where one is needed.
    """
    try:
        yield
    except FreeMoEError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ArtifactError(
            f"The result of {str(source)!r} cannot be shown ({type(error).__name__}: {error}). {_ADVICE}"
        ) from error
