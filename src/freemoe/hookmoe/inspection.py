"""What a trimmed mixture holds, read from its folder; no torch is loaded unless a base is given to check against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freemoe.core.artifacts import read_manifest
from freemoe.hookmoe.artefact_files import CONFIG, WEIGHTS


def inspect_trimmed(folder: Path, base: str | None = None) -> dict[str, Any]:
    """Check an artefact and describe it; with a base, also that it fits and that the base's router does what its k says.

    Raises:
        ArtifactError: When it is damaged, or made for another base.
    """
    manifest = read_manifest(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if base is not None:
        from freemoe.hookmoe.adapter import load_adapter
        from freemoe.models.checkpoints.loading import load_base

        load_adapter(folder, load_base(base)[0])
    counts = [k for k in config["top_k"] if k is not None]
    return {
        "artefact": str(folder),
        "made by": f"freemoe {manifest['freemoe_version']}",
        "base": manifest["base_model_name_or_path"],
        "base fingerprint": manifest["base_fingerprint"],
        "fits the base given": "not checked (--base)" if base is None else "yes",
        "files": f"{len(manifest['files'])}, all whole",
        "experts per token": ",".join("-" if k is None else str(k) for k in config["top_k"]),
        "Act": round(sum(counts) / len(counts), 4),
        "hooks": [{"layer": n, "width": d} for n, d in config["hook_layers"].items()],
        "position": config["position"],
        "scope": config["scope"],
        "bytes": (folder / WEIGHTS).stat().st_size,
    }
