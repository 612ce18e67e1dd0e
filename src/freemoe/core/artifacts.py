"""One folder format for every output: manifest with checksums, safetensors, recipe, model card; bound to its base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from freemoe.core.errors import ArtifactError, DataError
from freemoe.core.files import CARD, MANIFEST, PAGES, write_atomic
from freemoe.core.run.folder import IDENTITY, RUNNING, WORKING
from freemoe.core.untrusted import read_json, validate_strict

FORMAT = 3
"""Of what is written; since 3 experts can hold whole units."""

_OLDEST = 2


Share = Annotated[float, Field(ge=0, le=1)]
# Divided by a smaller temperature, logits are infinite.
Temperature = Annotated[float, Field(ge=1e-6, le=1e6)]
Classes = Annotated[list[str], Field(min_length=1)]


class _ManifestPart(BaseModel):
    """A piece of a manifest. What systems write is typed here too, as names and routes are listed without opening a system.

    Keys that are not known may stand at the top and in experts: a newer freemoe writes more. In a rule, a router or an identity they
    would mean something.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class BandRule(_ManifestPart):
    """The band of an expert: ``domain_experts.rank.bands.Band``."""

    metric: str
    start: Share
    end: Share
    p: str = "2"
    scope: Literal["row", "layer"] = "row"
    sublayers: str = "both"
    layers: tuple[int, int] | None = None
    patch: int = Field(1, ge=1, lt=2**31)
    seed: int = Field(0, ge=0, lt=2**64)

    @model_validator(mode="after")
    def _is_not_empty(self) -> BandRule:
        if self.start >= self.end:
            raise ValueError("a band ends above its start")
        return self


class ExpertEntry(_ManifestPart):
    """One expert; its tensors are read by ``domain_experts.expert``."""

    model_config = ConfigDict(extra="allow")

    name: str
    kind: Literal["base", "band", "switch", "unit"]
    band: BandRule | None = None
    unit: str | None = None

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> ExpertEntry:
        if (self.band is None) == (self.kind == "band") or (self.unit is None) == (self.kind == "unit"):
            raise ValueError("a band has a rule, a unit expert a kind of unit, and no other expert has either")
        return self


class RouterEntry(_ManifestPart):
    """The router; its tensors are read by ``domain_experts.route.reading``."""

    domains: Classes
    subdomains: dict[str, Classes]
    temperature: Temperature
    subdomain_temperatures: dict[str, Temperature]
    # Where no confidence is enough it lies just above 1.
    threshold: float = Field(ge=0, le=1.02)
    feature: Literal["embedding", "hidden"]

    @model_validator(mode="after")
    def _is_complete(self) -> RouterEntry:
        if not sorted(self.domains) == sorted(self.subdomains) == sorted(self.subdomain_temperatures):
            raise ValueError("every domain has subdomains and a temperature of its own, once")
        if any(len(set(classes)) < len(classes) for classes in self.subdomains.values()):
            raise ValueError("a subdomain is there twice")
        return self


class BaseIdentity(_ManifestPart):
    """What decides a base's answers beside its weights: ``models.checkpoints.identity``."""

    transformers: str
    config: dict[str, Any] = Field(min_length=1)
    buffers: str
    tokenizer: dict[str, str | None] | None


class SeenEntry(_ManifestPart):
    """The record of what the making saw."""

    model_config = ConfigDict(extra="allow")

    file: Literal["seen.safetensors"]


class ManifestSchema(_ManifestPart):
    """What a manifest may say, held against whatever is read before a command, a server or a system looks at it."""

    model_config = ConfigDict(extra="allow")

    format: int
    # Who needs one of these four says that it is not there.
    kind: str = ""
    freemoe_version: str = ""
    base_model_name_or_path: str = ""
    base_fingerprint: str = ""
    revision: str | None = None
    base_identity: BaseIdentity | None = None
    files: dict[str, str]
    checksum: str | None = None
    experts: list[ExpertEntry] = []
    router: RouterEntry | None = None
    plan: list[int | None] | None = None
    seen: SeenEntry | None = None
    chat: bool = False


def _file_checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    """Checksum of what a manifest says, its own checksum left out; line breaks and order of keys do not matter."""
    said = {k: v for k, v in manifest.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    """Write the manifest last: it lists the checksum of every other file of the folder and of itself."""
    files = {
        str(path.relative_to(folder)): _file_checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in (MANIFEST, RUNNING, "journal.jsonl", IDENTITY, *PAGES)
        and path.relative_to(folder).parts[0] not in WORKING
    }
    manifest = {"format": FORMAT, **body, "files": files}
    manifest["checksum"] = _own_checksum(manifest)
    write_atomic(folder / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())


class ArtefactManifest(dict[str, Any]):
    """What an artefact says of itself, as `ManifestSchema` has it; to ask for an entry that it lacks is an ArtifactError."""

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise ArtifactError(
            f"{str(self.path)!r} is damaged: it lacks {name!r}. Copy the artefact again or build it anew."
        )


def read_manifest(folder: str | Path, check: bool = True) -> ArtefactManifest:
    """Read an artefact's manifest and check it and every file but the model card against its checksums.

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
        what = f"it has no {MANIFEST}" if root.is_dir() and any(root.iterdir()) else "the folder is empty"
        what = what if root.is_dir() else "it is a file" if root.exists() else "there is nothing of that name"
        raise ArtifactError(f"{str(root)!r} is not an artefact: {what}.{hint}{advice}")
    try:
        said = read_json(path, finite=False)
    except DataError as error:
        raise ArtifactError(f"{str(path)!r} is damaged: {error} Copy the artefact again or build it anew.") from None
    version = said.get("format") if isinstance(said, dict) else None
    if type(version) is int and version not in range(_OLDEST, FORMAT + 1):
        raise ArtifactError(
            f"{str(path)!r} has format {version!r}; this freemoe reads format {FORMAT} back to {_OLDEST}. Install "
            "the freemoe that wrote it, or build it anew."
        )
    validate_strict(ManifestSchema, said, repr(str(path)), ArtifactError, "Copy the artefact again or build it anew.")
    manifest = ArtefactManifest(said, path)
    if check:
        if manifest.get("checksum") != _own_checksum(manifest):
            raise ArtifactError(
                f"{MANIFEST!r} in {str(root)!r} was edited: its checksum is not its own. Copy the artefact again or build "
                "it anew."
            )
        for name, expected in manifest["files"].items():
            file = root / name
            if name == CARD:
                continue
            if not file.is_file():
                raise ArtifactError(f"{str(root)!r} lacks {name!r}, which its manifest lists. Copy the artefact again.")
            if _file_checksum(file) != expected:
                raise ArtifactError(
                    f"{name!r} in {str(root)!r} was cut short or edited: its checksum is not the manifest's. Copy the "
                    "artefact again or build it anew."
                )
    return manifest


def tensor_checksums(folder: str | Path) -> dict[str, str] | None:
    """Checksum of every file of tensors, by name: the same for an artefact that was made anew; None where none stands."""
    if not (Path(folder) / MANIFEST).is_file():
        return None
    files = read_manifest(folder, check=False)["files"]
    return {name: checksum for name, checksum in files.items() if name.endswith(".safetensors")}


def read_tensors(folder: str | Path, name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a safetensors file of an artefact, every one of them finite.

    Raises:
        ArtifactError: The manifest does not vouch for the file, it cannot be read, or holds NaN, infinity or floats of 8 bits.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if name not in manifest["files"]:
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


def describe_artefact(folder: Path, manifest: Mapping[str, Any], base: str | None) -> dict[str, Any]:
    """What every artefact says of itself, as plain data for `freemoe inspect`.

    ``fits_base`` is None where no base was given.
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
