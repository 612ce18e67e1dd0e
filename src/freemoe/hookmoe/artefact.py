"""A trimmed mixture: opened, described, evaluated."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from freemoe.core.artifacts import describe_artefact
from freemoe.evals.engine.answering import Answering
from freemoe.evals.held_out import read_shared
from freemoe.hookmoe.adapter import load_adapter, load_trimmed, read_hooks
from freemoe.hookmoe.artefact_files import WEIGHTS, name_in
from freemoe.hub.fetch import HubAccess
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.checkpoints.placement import Placement


def load_artefact(folder: Path, base: str | None, dtype: str, device: Placement, access: HubAccess) -> Answering:
    """Open a trimmed mixture to answer with, on its base or a given one."""
    model, tokenizer, trimmed = load_trimmed(folder, base, dtype, device, access)
    ways = {"trimmed": lambda: trimmed.attached(model, quick=True), "base": nullcontext}
    return Answering(model, tokenizer, ways, folder)


def inspect_artefact(folder: Path, base: str | None = None) -> dict[str, Any]:
    """Check an artefact, open all its files and describe it; with a base, also that its router does what its k says.

    Raises:
        ArtifactError: When it is damaged, cannot be read, or was made for another base.
    """
    manifest = read_shared(folder)
    config, _ = read_hooks(folder, manifest)
    if base is not None:
        load_adapter(folder, *load_base(base))
    counts = [k for k in config["top_k"] if k is not None]
    return {
        **describe_artefact(folder, manifest, base),
        "experts_per_token": config["top_k"],
        "mean_experts_per_token": sum(counts) / len(counts),
        "hooks": [{"layer": int(n), "width": d} for n, d in config["hook_layers"].items()],
        "rescale": config["rescale"],
        "position": config["position"],
        "scope": config["scope"],
        "bytes": (folder / name_in(manifest, WEIGHTS)).stat().st_size,
    }
