"""One folder format for every output: manifest with checksums, safetensors, recipe, model card; bound to its base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freemoe.core.errors import ArtifactError
from freemoe.core.files import MANIFEST, write_atomic
from freemoe.core.run.folder import RUNNING

FORMAT = 3
"""Of what is written; since 3 experts can hold whole units."""

_OLDEST = 2


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    """Checksum of what a manifest says, its own checksum left out; line breaks and order of keys do not matter."""
    said = {k: v for k, v in manifest.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    """Write the manifest last: it lists the checksum of every other file of the folder and of itself."""
    files = {
        str(path.relative_to(folder)): _checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in (MANIFEST, RUNNING, "journal.jsonl", "identity.json")
        and "units" not in path.relative_to(folder).parts
    }
    manifest = {"format": FORMAT, **body, "files": files}
    manifest["checksum"] = _own_checksum(manifest)
    write_atomic(folder / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())


def read_manifest(folder: str | Path, check: bool = True) -> dict[str, Any]:
    """Read an artefact's manifest and check it and every file against its checksums.

    Args:
        folder: The artefact.
        check: Compare the checksums too.

    Raises:
        ArtifactError: When the folder is no artefact, is of another format, or a file is missing, cut short or edited.
    """
    root = Path(folder)
    path = root / MANIFEST
    if not path.is_file():
        near = root.with_name(root.name + ".partial")
        hint = (
            f" An unfinished run stands at {str(near)!r}: run its command again to finish it." if near.exists() else ""
        )
        raise ArtifactError(f"{str(root)!r} is not an artefact: it has no {MANIFEST}.{hint}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
        files = dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{str(path)!r} is damaged ({error!r}). Copy the artefact again or build it anew."
        ) from None
    if version not in range(_OLDEST, FORMAT + 1):
        raise ArtifactError(
            f"{str(path)!r} has format {version!r}; this freemoe reads format {FORMAT} back to {_OLDEST}. Install "
            "the freemoe that wrote it, or build it anew."
        )
    if check:
        if manifest.get("checksum") != _own_checksum(manifest):
            raise ArtifactError(
                f"{MANIFEST!r} in {str(root)!r} was edited: its checksum is not its own. Copy the artefact again or build "
                "it anew."
            )
        for name, expected in files.items():
            file = root / name
            if not file.is_file():
                raise ArtifactError(f"{str(root)!r} lacks {name!r}, which its manifest lists. Copy the artefact again.")
            if _checksum(file) != expected:
                raise ArtifactError(
                    f"{name!r} in {str(root)!r} was cut short or edited: its checksum is not the manifest's. Copy the "
                    "artefact again or build it anew."
                )
    return manifest
