"""What an artefact or a base holds, as plain data for `freemoe inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from freemoe.artifacts import read_manifest, require_base
from freemoe.domain_experts.expert import Expert
from freemoe.domain_experts.switching import count, share
from freemoe.families.loading import load_base, origin
from freemoe.families.weights import describe, find_weights


def inspect_artefact(folder: Path, base: str | None = None) -> dict[str, Any]:
    """Check an artefact and describe its experts; with a base, also count what each switches off.

    Raises:
        ArtifactError: When it is damaged, or made for another base.
    """
    manifest = read_manifest(folder)
    tensors = load_file(folder / "experts.safetensors")
    weights = None
    if base is not None:
        model, _ = load_base(base)
        require_base(manifest, model)
        weights = find_weights(model)
    experts = []
    for described in manifest["experts"]:
        expert = Expert.from_parts(described, tensors)
        size = sum(t.numel() * t.element_size() for t in expert.to_tensors().values())
        row = {
            "name": expert.name,
            "kind": expert.kind,
            "rule": expert.band.name if expert.band else "-",
            "bytes": size,
        }
        if weights is not None:
            positions = expert.positions(weights)
            row |= {"off": count(positions), "off %": f"{100 * share(weights, positions):.3f}"}
        experts.append(row)
    return {
        "artefact": str(folder),
        "made by": f"freemoe {manifest['freemoe_version']}",
        "base": manifest["base_model_name_or_path"],
        "base fingerprint": manifest["base_fingerprint"],
        "fits the base given": "not checked (--base)" if base is None else "yes",
        "files": f"{len(manifest['files'])}, all whole",
        "experts": experts,
        "router": "none" if not manifest.get("router") else ", ".join(manifest["router"]["domains"]),
        "router abstains below": manifest["router"]["threshold"] if manifest.get("router") else "-",
    }


def inspect_model(model: str) -> dict[str, Any]:
    """What freemoe finds in a base: its family and the weights that can be switched off."""
    base, tokenizer = load_base(model)
    return {
        "model": model,
        "found": str(describe(base)),
        "dtype": str(base.dtype).removeprefix("torch."),
        **({"origin": said} if (said := origin(model)) else {}),
        "tokenizer": "none" if tokenizer is None else f"{len(tokenizer)} tokens",
    }
