"""`merge`: one expert of an artefact as a plain checkpoint, and as a GGUF file, that need no freemoe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError, DataError, RecipeError
from freemoe.core.registry import unknown_name
from freemoe.domain_experts.expert import require_zeros_say
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.structured.merging import merge_shrunk, require_units
from freemoe.evals.engine.answering import BASE
from freemoe.models.checkpoints.gguf_header import is_gguf
from freemoe.models.checkpoints.gguf_writing import require_file_type, write_gguf
from freemoe.models.checkpoints.placement import Placement
from freemoe.results.build import KIND


def merge(
    artefact: str | Path,
    expert: str,
    output: str | Path,
    *,
    base: str | None = None,
    gguf: str | None = None,
    shrink: bool = False,
    pad: bool = False,
    overwrite: bool = False,
    dtype: str = "auto",
    device: Placement = "cpu",
) -> dict[str, Any]:
    """Write one expert into the base's weights as a plain Hugging Face checkpoint with its tokenizer.

    Args:
        artefact: Folder written by ``freemoe build``.
        expert: Its name, or ``base``.
        output: Folder to write.
        base: Folder, GGUF file or hub id of the base; what the artefact names if absent.
        gguf: Also write ``model-TYPE.gguf`` into the folder: f32, f16 or q8_0. The base must be a GGUF file.
        shrink: Cut the expert's units out: a smaller model of the same class.
        pad: With ``shrink``: fill every layer up to the largest with zeros, where layers are left with different numbers.
        overwrite: Replace an older model folder.
        dtype: Of the base; its values must survive it.
        device: Where the base is loaded.

    Returns:
        Folder, GGUF file or None, weights off (None where units are cut out), and bytes written.

    Raises:
        FreeMoEError: Its child that says what is wrong; nothing is left half written.
    """
    found = outlook(artefact, expert, output, base=base, gguf=gguf, shrink=shrink, pad=pad, overwrite=overwrite)
    if shrink:
        folder = merge_shrunk(
            artefact, expert, output, base=base, pad=pad, overwrite=overwrite, dtype=dtype, device=device
        )
        return {**found, "weights_off": None, "bytes": _written(folder)}
    moe = FreeMoE.from_pretrained(base, artefact, dtype=dtype, device=device)
    off = moe.expert_mask(expert).count

    def also(folder: Path) -> None:
        if gguf is not None:
            write_gguf(moe.model, folder / _name(gguf), gguf, Path(found["base"]))

    folder = moe.merge_and_save(expert, output, also=also, overwrite=overwrite)
    return {**found, "weights_off": off, "bytes": _written(folder)}


def _written(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.is_file()}


def outlook(
    artefact: str | Path,
    expert: str,
    output: str | Path,
    *,
    base: str | None = None,
    gguf: str | None = None,
    shrink: bool = False,
    pad: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Check a merge before any weight is loaded, and say what it would write; see `merge`."""
    manifest = read_manifest(artefact)
    experts = {described["name"]: described for described in manifest.get("experts", [])}
    chosen, names = experts.get(expert, {}), list(experts)
    if pad and not shrink:
        raise RecipeError("--pad fills up what --shrink leaves; give both, or neither.")
    if shrink and gguf is not None:
        raise RecipeError(
            "--shrink and --gguf exclude each other: a base's GGUF file says sizes that the smaller model no longer has. Merge "
            "with --shrink alone, and convert the folder with llama.cpp's convert_hf_to_gguf.py."
        )
    if expert not in (BASE, *names) and manifest.get("kind") == KIND:
        raise unknown_name(
            "expert", expert, [BASE, *names], "A merged model is one expert; the router is not part of it."
        )
    if shrink:
        require_units(expert, chosen.get("kind", BASE))
    else:
        require_zeros_say(expert, chosen.get("unit"))
    if Path(output).exists() and not overwrite:
        raise ArtifactError(f"{str(output)!r} exists already. Choose another -o, or --overwrite to replace it.")
    source = base or manifest["base_model_name_or_path"]
    for held in (Path(source).resolve(), Path(artefact).resolve()):
        if Path(output).resolve() in (held, *held.parents):
            raise ArtifactError(f"{str(output)!r} holds {str(held)!r}, which is merged; choose another -o.")
    if gguf is not None:
        require_file_type(gguf)
        if not is_gguf(source):
            raise DataError(
                f"--gguf copies tokenizer and metadata from the base's own GGUF file, and the base {source!r} is none. Merge "
                "without --gguf, and convert the folder with llama.cpp's convert_hf_to_gguf.py."
            )
    return {
        "folder": str(output),
        "gguf": None if gguf is None else str(Path(output) / _name(gguf)),
        "expert": expert,
        "base": str(source),
        "shrink": shrink,
    }


def _name(file_type: str) -> str:
    return f"model-{file_type}.gguf"
