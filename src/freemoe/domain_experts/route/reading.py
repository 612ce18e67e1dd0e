"""A router as an artefact holds it, checked before anything is routed: one that cannot decide would send every prompt to the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from freemoe.core.artifacts import read_tensors
from freemoe.core.errors import ArtifactError
from freemoe.domain_experts.expert import DomainExpert
from freemoe.domain_experts.route.router import DomainRouter

ROUTER = "router.safetensors"
"""The file of an artefact that holds it."""


def read_router(
    folder: str | Path, manifest: Mapping[str, Any], experts: Sequence[DomainExpert]
) -> DomainRouter | None:
    """The router of an artefact; None where it has none.

    Raises:
        ArtifactError: It holds NaN, its tensors do not fit its classes, or its classes not the experts.
    """
    if manifest.get("router") is None:
        return None
    tensors = read_tensors(folder, ROUTER, manifest)
    try:
        router = DomainRouter.from_parts(manifest["router"], tensors)
        faults = _router_faults(router, {expert.name for expert in experts})
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        faults = [f"{type(error).__name__}: {error}"]
        router = None
    if faults or router is None:
        raise ArtifactError(
            f"The router of {str(folder)!r} cannot decide: {'; '.join(faults[:3])}. Copy the artefact again or build it anew."
        )
    return router


def require_features(router: DomainRouter | None, model: Any) -> None:
    """Raise unless a router reads features as wide as a base's embedding.

    Raises:
        ArtifactError: It does not.
    """
    width = model.get_input_embeddings().weight.shape[1]
    if router is not None and len(router.mean) != width:
        raise ArtifactError(
            f"The router reads features of {len(router.mean)} numbers, and the base's have {width}: it is another base's."
        )


def _router_faults(router: DomainRouter, experts: set[str]) -> list[str]:
    """Why it cannot route, in words."""
    width = len(router.mean)
    found = []
    if {router.mean.dtype, router.scale.dtype} != {torch.float32}:
        found.append(f"mean and scale are of the types {router.mean.dtype} and {router.scale.dtype}, not float32")
    if router.mean.shape != (width,) or router.scale.shape != (width,) or not bool((router.scale > 0).all()):
        found.append(
            f"mean and scale have the shapes {tuple(router.mean.shape)} and {tuple(router.scale.shape)}, or no width"
        )
    for name, level in {"its domains": router.domain, **router.subdomain}.items():
        count, shape = len(level.classes), tuple(level.weight.shape)
        if shape != (count, width) or tuple(level.bias.shape) not in ((count,), (0,)):
            found.append(f"{name}: {count} classes of {width} numbers have weights of the shape {shape}")
        if {level.weight.dtype, level.bias.dtype} != {torch.float32}:
            found.append(
                f"{name}: its numbers are of the types {level.weight.dtype} and {level.bias.dtype}, not float32"
            )
    ways = [name for level in router.subdomain.values() for name in level.classes]
    if strangers := sorted(set(ways) - experts):
        found.append(f"it leads to {strangers[0]!r}, which is no expert here")
    return found
