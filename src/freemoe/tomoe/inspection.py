"""What a converted model holds, as plain data for `freemoe inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freemoe.core.artifacts import about, read_manifest
from freemoe.models.checkpoints.identity import require_base
from freemoe.models.checkpoints.loading import load_base
from freemoe.results import read_result
from freemoe.tomoe.card import rows


def inspect_converted(folder: Path, base: str | None = None) -> dict[str, Any]:
    """Check a converted model's files and describe it.

    Raises:
        ArtifactError: When it is damaged, or made from another base than the one given.
    """
    manifest = read_manifest(folder)
    if base is not None:
        require_base(manifest, *load_base(base))
    result = read_result(folder)
    parameters, length = result["parameters"], result["blocks"]["length"]
    return {
        **about(folder, manifest, base),
        "method": result["recipe"]["method"],
        "active_share": parameters["active_share"],
        "active_at_run_time_share": parameters["active_share_at_run_time"],
        "block_tokens": length,
        "test_text": [
            {"name": name, "active_share": active, "perplexity": perplexity}
            for name, active, perplexity, _ in rows(result)
        ],
        "layers": [
            {
                "layer": number,
                "query_dims": layer["query_dims"],
                "value_dims": layer["value_dims"],
                "of_dims": layer["head_dim"],
                "neurons": max(layer["widths"]),
                "union": layer["union"],
                "of_neurons": layer["width"],
            }
            for number, layer in enumerate(result["layers"])
        ],
    }
