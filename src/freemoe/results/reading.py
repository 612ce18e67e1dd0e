"""A result from its file, held against its type: what is not what the schema says is never shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError, FreeMoEError
from freemoe.core.files import MANIFEST
from freemoe.core.untrusted import faults_text
from freemoe.results import common
from freemoe.results.build import BuildResult
from freemoe.results.convert import ConvertResult
from freemoe.results.trim import TrimResult

_ADVICE = "It was cut short or edited: copy the artefact again or make it anew."

_TYPES: dict[str, type[common.Result]] = {
    "domain-experts": BuildResult,
    "converted": ConvertResult,
    "trimmed-moe": TrimResult,
}


def read_result(folder: str | Path, exact: bool = False) -> dict[str, Any]:
    """The ``result.json`` of a folder, or that file itself, as plain data; of a kind that is known, what its type says.

    Args:
        folder: The artefact, or the file.
        exact: Refuse keys that are not known here too: a newer freemoe writes more of them under the same format.

    Raises:
        ArtifactError: There is none, it is damaged or not what its type says, of another kind than the artefact, or a newer
            freemoe wrote it.
    """
    found = common.read_result(folder)
    kind = found.get("kind")
    if (Path(folder) / MANIFEST).is_file() and kind != (wanted := read_manifest(folder, check=False).get("kind")):
        raise ArtifactError(
            f"The result of {str(folder)!r} is of kind {kind!r}, and its artefact is {wanted!r}. {_ADVICE}"
        )
    if isinstance(kind, str) and kind in _TYPES:
        try:
            # From JSON, where a list may be a tuple, but a text no number.
            _TYPES[kind].model_validate_json(json.dumps(found), strict=True)
        except ValidationError as error:
            wrong = [fault for fault in error.errors() if exact or fault["type"] != "extra_forbidden"]
            if wrong:
                raise ArtifactError(
                    f"The result of {str(folder)!r} is not whole: {faults_text(wrong)} {_ADVICE}"
                ) from None
    return found


@contextmanager
def shown(source: str | Path) -> Iterator[None]:
    """Around what shows a result: its open parts (``recipe``, ``environment``, ``speed`` ...) have no type that could be checked.

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
