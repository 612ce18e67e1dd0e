"""What a trimmed mixture holds, read from its folder; no torch is loaded unless a base is given to check against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freemoe.core.artifacts import about, read_manifest
from freemoe.hookmoe.artefact_files import WEIGHTS, name_in, read_config


def inspect_trimmed(folder: Path, base: str | None = None) -> dict[str, Any]:
    """Check an artefact and describe it; with a base, also that it fits and that the base's router does what its k says.

    Raises:
        ArtifactError: When it is damaged, or made for another base.
    """
    manifest = read_manifest(folder)
    config = read_config(folder, manifest)
    if base is not None:
        from freemoe.hookmoe.adapter import load_adapter
        from freemoe.models.checkpoints.loading import load_base

        load_adapter(folder, *load_base(base))
    counts = [k for k in config["top_k"] if k is not None]
    return {
        **about(folder, manifest, base),
        "experts_per_token": config["top_k"],
        "mean_experts_per_token": sum(counts) / len(counts),
        "hooks": [{"layer": int(n), "width": d} for n, d in config["hook_layers"].items()],
        "rescale": config["rescale"],
        "position": config["position"],
        "scope": config["scope"],
        "bytes": (folder / name_in(manifest, WEIGHTS)).stat().st_size,
    }
