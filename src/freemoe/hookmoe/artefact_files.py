"""The files of a trimmed mixture's folder, and its kind; nothing here loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from freemoe.core.errors import ArtifactError
from freemoe.core.untrusted import read_json, validate_strict

KIND = "trimmed-moe"
CONFIG, WEIGHTS = "hookmoe_config.json", "hookmoe.safetensors"

_OLDER = {CONFIG: "adapter_config.json", WEIGHTS: "adapter_model.safetensors"}
"""Names that earlier artefacts have. They are PEFT's: transformers takes such a folder for one of its adapters."""


class HookmoeConfig(BaseModel):
    """The file ``CONFIG`` of an artefact: the plan, and where the hooks stand."""

    model_config = ConfigDict(extra="allow", frozen=True)

    family: str
    hidden_size: int = Field(ge=1, lt=2**31)
    num_hidden_layers: int = Field(ge=1, lt=2**31)
    top_k: list[int | None] = Field(min_length=1)
    rescale: str
    hook_layers: dict[Annotated[str, Field(pattern="^[0-9]{1,6}$")], Annotated[int, Field(ge=1, lt=2**31)]]
    scope: str | None
    position: str | None
    bias: bool


def name_in(manifest: Mapping[str, Any], name: str) -> str:
    """What a file, ``CONFIG`` or ``WEIGHTS``, is called in the artefact that a manifest describes."""
    older = _OLDER[name]
    return older if older in manifest.get("files", {}) else name


def read_config(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an artefact.

    Raises:
        ArtifactError: The manifest does not vouch for them, they lack an entry, or their plan is not the manifest's.
    """
    name = name_in(manifest, CONFIG)
    if name not in manifest["files"]:
        raise ArtifactError(f"The manifest of {str(folder)!r} does not list {name!r}. Copy the artefact again.")
    found = read_json(folder / name, ArtifactError)
    validate_strict(
        HookmoeConfig, found, f"{name!r} in {str(folder)!r}", ArtifactError, "Copy the artefact again or make it anew."
    )
    if found["top_k"] != manifest.get("plan", found["top_k"]):
        raise ArtifactError(
            f"{name!r} in {str(folder)!r} has the plan {found['top_k']}, and the manifest has {manifest['plan']}. Copy the "
            "artefact again or make it anew."
        )
    return found
