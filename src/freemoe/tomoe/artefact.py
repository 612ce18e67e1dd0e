"""A converted model: opened, described, evaluated."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from freemoe.core.artifacts import ArtefactManifest, describe_artefact, read_manifest
from freemoe.core.errors import ArtifactError
from freemoe.evals.engine.answering import Answering
from freemoe.evals.evaluation import EvalTarget, plain_model
from freemoe.evals.held_out import read_shared
from freemoe.hub.fetch import HubAccess
from freemoe.models.checkpoints.identity import require_base
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.checkpoints.placement import Placement, require_one_device
from freemoe.recipes import EvalRecipe
from freemoe.results import read_result
from freemoe.tomoe.card import score_rows
from freemoe.tomoe.result import ConvertResult
from freemoe.tomoe.structures.structure import STRUCTURE, read_structure


def read_files(folder: Path) -> tuple[ArtefactManifest, ConvertResult]:
    """Open the files of a converted model, its weights left out. Gives its manifest and its result.

    Raises:
        ArtifactError: One is damaged, or the structure is not the result's.
    """
    manifest = read_shared(folder)
    result, structure = read_result(folder, ConvertResult), read_structure(folder, manifest)
    told = [(layer.widths, layer.union, layer.value_dims) for layer in result.layers]
    if told != [(own.neuron_counts, own.union_width, own.value_width) for own in structure]:
        raise ArtifactError(f"{STRUCTURE!r} in {str(folder)!r} keeps other neurons or dimensions than its result says.")
    return manifest, result


def load_artefact(folder: Path, base: str | None, dtype: str, device: Placement, access: HubAccess) -> Answering:
    """Open a converted model to answer with.

    Raises:
        ArtifactError: It is damaged, a base is given, or it would be spread over several devices.
    """
    if base is not None:
        raise ArtifactError(f"{str(folder)!r} is a whole model: it needs no base. Leave --base out.")
    read_manifest(folder)
    require_one_device(device, "A converted model")
    del access  # it is here already, and whole
    return Answering(*load_base(folder, None, dtype, device), ways={"converted": nullcontext}, folder=folder)


def eval_target(recipe: EvalRecipe) -> EvalTarget:
    """A converted model as what an evaluation scores: a plain model."""
    require_one_device(recipe.device, "A converted model")
    return plain_model(recipe)


def inspect_artefact(folder: Path, base: str | None = None) -> dict[str, Any]:
    """Check a converted model, load it and describe it.

    Raises:
        ArtifactError: When it is damaged, cannot be read, or was made from another base than the one given.
        DataError: When it cannot be loaded.
    """
    manifest, result = read_files(folder)
    load_base(folder, device="cpu")
    if base is not None:
        require_base(manifest, *load_base(base))
    parameters, length = result.parameters, result.blocks.length
    return {
        **describe_artefact(folder, manifest, base),
        "method": result.recipe["method"],
        "active_share": parameters["active_share"],
        "active_at_run_time_share": parameters["active_share_at_run_time"],
        "block_tokens": length,
        "test_text": [
            {"name": name, "active_share": active, "perplexity": perplexity}
            for name, active, perplexity, _ in score_rows(result)
        ],
        "layers": [
            {
                "layer": number,
                "query_dims": layer.query_dims,
                "value_dims": layer.value_dims,
                "of_dims": layer.head_dim,
                "neurons": max(layer.widths),
                "union": layer.union,
                "of_neurons": layer.width,
            }
            for number, layer in enumerate(result.layers)
        ],
    }
