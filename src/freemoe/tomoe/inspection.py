"""What a converted model holds, as plain data for `freemoe inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freemoe.core.artifacts import ArtefactManifest, describe_artefact
from freemoe.core.errors import ArtifactError
from freemoe.evals.held_out import read_shared
from freemoe.models.checkpoints.identity import require_base
from freemoe.models.checkpoints.loading import load_base
from freemoe.results import ConvertResult, read_result
from freemoe.tomoe.card import score_rows
from freemoe.tomoe.structures.structure import STRUCTURE, read_structure


def read_files(folder: Path) -> tuple[ArtefactManifest, ConvertResult]:
    """Open the files of a converted model, its weights left out.

    Args:
        folder: The model.

    Returns:
        Its manifest and its result.

    Raises:
        ArtifactError: One is damaged, or the structure is not the result's.
    """
    manifest = read_shared(folder)
    result, structure = read_result(folder, ConvertResult), read_structure(folder, manifest)
    told = [(layer.widths, layer.union, layer.value_dims) for layer in result.layers]
    if told != [(own.neuron_counts, own.union_width, own.value_width) for own in structure]:
        raise ArtifactError(f"{STRUCTURE!r} in {str(folder)!r} keeps other neurons or dimensions than its result says.")
    return manifest, result


def inspect_converted(folder: Path, base: str | None = None) -> dict[str, Any]:
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
