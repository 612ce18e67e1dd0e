"""The files of a trimmed mixture's folder, and how it is recognised; nothing here loads torch."""

from __future__ import annotations

from pathlib import Path

from freemoe.core.artifacts import MANIFEST, read_manifest

KIND = "trimmed-moe"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_trimmed(folder: str | Path) -> bool:
    """Whether a folder is an artefact of `freemoe trim`."""
    return (Path(folder) / MANIFEST).is_file() and read_manifest(folder, check=False).get("kind") == KIND
