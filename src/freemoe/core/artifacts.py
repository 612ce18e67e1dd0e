"""One folder format for every output: manifest with checksums, safetensors, recipe, model card; bound to its base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from freemoe.core.errors import ArtifactError, DataError
from freemoe.core.files import CARD, MANIFEST, PAGES, write_atomic
from freemoe.core.run.folder import IDENTITY, RUNNING, WORKING
from freemoe.core.untrusted import read_json

T = TypeVar("T")

FORMAT = 3
"""Of what is written; since 3 experts can hold whole units."""

_OLDEST = 2

_WORDS = ("kind", "freemoe_version", "base_model_name_or_path", "base_fingerprint")


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
        and path.name not in (MANIFEST, RUNNING, "journal.jsonl", IDENTITY, *PAGES)
        and path.relative_to(folder).parts[0] not in WORKING
    }
    manifest = {"format": FORMAT, **body, "files": files}
    manifest["checksum"] = _own_checksum(manifest)
    write_atomic(folder / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())


class Manifest(dict[str, Any]):
    """What an artefact says of itself; to ask it for an entry that it lacks is an ArtifactError.

    Args:
        said: Its entries.
        path: Where it was read.
    """

    def __init__(self, said: Mapping[str, Any], path: Path) -> None:
        super().__init__(said)
        self.path = path
        for name in _WORDS:
            if not isinstance(self.get(name, ""), str):
                raise ArtifactError(f"{str(path)!r} is damaged: {name} is {self[name]!r:.80}. Copy the artefact again.")

    def __missing__(self, name: str) -> Any:
        raise ArtifactError(
            f"{str(self.path)!r} is damaged: it lacks {name!r}. Copy the artefact again or build it anew."
        )


def read_manifest(folder: str | Path, check: bool = True) -> Manifest:
    """Read an artefact's manifest and check it and every file but the model card against its checksums.

    Args:
        folder: The artefact.
        check: Compare the checksums too.

    Raises:
        ArtifactError: When the folder is no artefact, is of another format, or a file is missing, cut short or edited.
    """
    root = Path(folder)
    path = root / MANIFEST
    if not path.is_file():
        near = root.parent / f"{root.name}.partial"
        hint = (
            f" An unfinished run stands at {str(near)!r}: run its command again to finish it." if near.exists() else ""
        )
        advice = "" if hint else " Give the folder that freemoe build, convert, trim or demo wrote."
        raise ArtifactError(f"{str(root)!r} is not an artefact: {_what_is_there(root)}.{hint}{advice}")
    try:
        manifest = Manifest(read_json(path, finite=False), path)
        version = manifest["format"]
        files = dict(manifest["files"])
    except ArtifactError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        said = error if isinstance(error, DataError) else f"{error!r}."
        raise ArtifactError(f"{str(path)!r} is damaged: {said} Copy the artefact again or build it anew.") from None
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
            if name == CARD:
                continue
            if not file.is_file():
                raise ArtifactError(f"{str(root)!r} lacks {name!r}, which its manifest lists. Copy the artefact again.")
            if _checksum(file) != expected:
                raise ArtifactError(
                    f"{name!r} in {str(root)!r} was cut short or edited: its checksum is not the manifest's. Copy the "
                    "artefact again or build it anew."
                )
    return manifest


def entry(manifest: Mapping[str, Any], name: str, kind: type[T], folder: str | Path) -> T:
    """An entry of a manifest.

    Raises:
        ArtifactError: It is missing, or of another type.
    """
    found = manifest.get(name)
    if not isinstance(found, kind):
        raise ArtifactError(
            f"The manifest of {str(folder)!r} has {name} = {found!r:.80}, where a {kind.__name__} is needed. Copy the artefact "
            "again or build it anew."
        )
    return found


def read_tensors(folder: str | Path, name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a safetensors file of an artefact, every one of them finite.

    Args:
        folder: The artefact, its files checked.
        name: Of the file.
        manifest: The artefact's.

    Raises:
        ArtifactError: The manifest does not vouch for the file, it cannot be read, or holds NaN, infinity or floats of 8 bits.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if name not in entry(manifest, "files", dict, folder):
        raise ArtifactError(f"The manifest of {str(folder)!r} does not list {name!r}. Copy the artefact again.")
    try:
        found = load_file(Path(folder) / name)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ArtifactError(f"{name!r} in {str(folder)!r} cannot be read: {error}. Copy the artefact again.") from None
    for key, tensor in found.items():
        if tensor.is_floating_point() and tensor.element_size() < 2:
            raise ArtifactError(
                f"{name!r} in {str(folder)!r} has numbers of the type {tensor.dtype} in {key!r}, of which no artefact is made. Copy "
                "it again or build it anew."
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ArtifactError(
                f"{name!r} in {str(folder)!r} has NaN or infinity in {key!r}, which would answer with noise. Build it anew."
            )
    return found


def _what_is_there(path: Path) -> str:
    if not path.exists():
        return "there is nothing of that name"
    if not path.is_dir():
        return "it is a file"
    if not any(path.iterdir()):
        return "the folder is empty"
    return f"it has no {MANIFEST}"


def about(folder: Path, manifest: Mapping[str, Any], base: str | None) -> dict[str, Any]:
    """What every artefact says of itself, as plain data for `freemoe inspect`.

    Args:
        folder: The artefact, its files checked.
        manifest: Its manifest.
        base: The base that it was found to fit; None where none was given, and ``fits_base`` is None then.
    """
    return {
        "artefact": str(folder),
        "kind": manifest["kind"],
        "made_by": f"freemoe {manifest['freemoe_version']}",
        "base": manifest["base_model_name_or_path"],
        "base_fingerprint": manifest["base_fingerprint"],
        "fits_base": None if base is None else True,
        "whole_files": len(manifest["files"]),
    }
