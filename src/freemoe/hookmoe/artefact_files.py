"""The files of a trimmed mixture's folder, and its kind; nothing here loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freemoe.core.artifacts import entry
from freemoe.core.errors import ArtifactError
from freemoe.core.untrusted import read_json

KIND = "trimmed-moe"
CONFIG, WEIGHTS = "hookmoe_config.json", "hookmoe.safetensors"

_OLDER = {CONFIG: "adapter_config.json", WEIGHTS: "adapter_model.safetensors"}
"""Names that earlier artefacts have. They are PEFT's: transformers takes such a folder for one of its adapters."""

_SETTINGS: dict[str, type | tuple[type, ...]] = {
    "family": str,
    "hidden_size": int,
    "num_hidden_layers": int,
    "top_k": list,
    "rescale": str,
    "hook_layers": dict,
    "scope": (str, type(None)),
    "position": (str, type(None)),
    "bias": bool,
}


def name_in(manifest: Mapping[str, Any], name: str) -> str:
    """What a file, ``CONFIG`` or ``WEIGHTS``, is called in the artefact that a manifest describes."""
    older = _OLDER[name]
    return older if older in manifest.get("files", {}) else name


def read_config(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an artefact.

    Raises:
        ArtifactError: The manifest does not vouch for them, they lack an entry, or their plan is not the manifest's.
    """
    listed = entry(manifest, "files", dict, folder)
    name = name_in(manifest, CONFIG)
    if name not in listed:
        raise ArtifactError(f"The manifest of {str(folder)!r} does not list {name!r}. Copy the artefact again.")
    try:
        found = read_json(folder / name)
        wrong = [key for key, kind in _SETTINGS.items() if not isinstance(found[key], kind)]
        if not wrong and not all(k is None or type(k) is int for k in found["top_k"]):
            wrong = ["top_k"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArtifactError(
            f"{name!r} in {str(folder)!r} cannot be read ({type(error).__name__}: {error}). Copy the artefact again."
        ) from None
    if wrong:
        raise ArtifactError(f"{name!r} in {str(folder)!r} has {wrong[0]} = {found[wrong[0]]!r:.80}. Make it anew.")
    if found["top_k"] != manifest.get("plan", found["top_k"]):
        raise ArtifactError(
            f"{name!r} in {str(folder)!r} has the plan {found['top_k']}, and the manifest has {manifest['plan']}. Copy the "
            "artefact again or make it anew."
        )
    return found
