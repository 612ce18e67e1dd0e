"""What a converted model holds, as plain data for `freemoe inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freemoe.core.artifacts import read_manifest
from freemoe.models.checkpoints.fingerprint import require_base
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
        require_base(manifest, load_base(base)[0])
    result = read_result(folder)
    parameters, length = result["parameters"], result["blocks"]["length"]
    return {
        "artefact": str(folder),
        "made by": f"freemoe {manifest['freemoe_version']}, method {result['recipe']['method']}",
        "base": manifest["base_model_name_or_path"],
        "base fingerprint": manifest["base_fingerprint"],
        "made from the base given": "not checked (--base)" if base is None else "yes",
        "files": f"{len(manifest['files'])}, all whole",
        "active weights of the linears": f"{parameters['active_share']:.1%} nominal, "
        f"{parameters['active_share_at_run_time']:.1%} at run time",
        "on test text": [
            {"name": name, "active": f"{active:.1%}", f"perplexity@{length}": f"{perplexity:.3f}"}
            for name, active, perplexity, _ in rows(result)
        ],
        "layers": [
            {
                "layer": number,
                "query dims": f"{layer['query_dims']}/{layer['head_dim']}",
                "value dims": f"{layer['value_dims']}/{layer['head_dim']}",
                "neurons": f"{max(layer['widths'])}/{layer['width']}",
                "union": layer["union"],
            }
            for number, layer in enumerate(result["layers"])
        ],
    }
