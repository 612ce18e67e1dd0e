"""`merge`: one expert of an artefact, or several combined, as a plain checkpoint, and as a GGUF file, that need no freemoe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from freemoe.core.artifacts import MANIFEST, read_manifest
from freemoe.core.errors import ArtifactError, DataError, RecipeError
from freemoe.core.registry import unknown_name
from freemoe.domain_experts.expert import require_accepted, require_zeros_say
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.result import KIND
from freemoe.domain_experts.structured.merging import require_units, write_shrunk
from freemoe.models.checkpoints.gguf_header import is_gguf
from freemoe.models.checkpoints.gguf_writing import require_file_type, write_gguf
from freemoe.models.checkpoints.placement import Placement
from freemoe.recipes.expert_names import BASE, SIGNS, ExpertRef, Operation


def merge(
    artefact: str | Path,
    expert: str | Sequence[str],
    output: str | Path,
    *,
    op: str | None = None,
    base: str | None = None,
    gguf: str | None = None,
    shrink: bool = False,
    pad: bool = False,
    overwrite: bool = False,
    allow_rejected: bool = False,
    dtype: str = "auto",
    device: Placement = "cpu",
    dry: bool = False,
) -> dict[str, Any]:
    """Write one expert, or several combined, into the base's weights as a plain Hugging Face checkpoint with its tokenizer.

    Args:
        artefact: Folder written by ``freemoe build``.
        expert: Its name, or ``base``; or several names, of which ``FOLDER:NAME`` is an expert of another artefact of the base.
        output: Folder to write.
        op: How several are combined: ``union`` (what any of them has off is off) or ``intersection``.
        base: Folder, GGUF file or hub id of the base; what the artefact names if absent.
        gguf: Also write ``model-TYPE.gguf`` into the folder: f32, f16 or q8_0. The base must be a GGUF file.
        shrink: Cut the expert's units out: a smaller model of the same class.
        pad: With ``shrink``: fill every layer up to the largest with zeros, where layers are left with different numbers.
        overwrite: Replace an older model folder.
        allow_rejected: Write the base for an expert that was rejected.
        dtype: Of the base; its values must survive it.
        device: Where the base is loaded.
        dry: Only check, before any weight is loaded, and say what would be written.

    Returns:
        Folder, GGUF file or None, weights off (None where units are cut out), and bytes written.

    Raises:
        FreeMoEError: Its child that says what is wrong; nothing is left half written.
    """
    manifest = read_manifest(artefact)
    ref = _read_names(expert, op, [described["name"] for described in manifest.get("experts", [])])
    source = base or manifest["base_model_name_or_path"]
    if pad and not shrink:
        raise RecipeError("--pad fills up what --shrink leaves; give both, or neither.")
    if shrink and gguf is not None:
        raise RecipeError(
            "--shrink and --gguf exclude each other: a base's GGUF file says sizes that the smaller model no longer has. Merge "
            "with --shrink alone, and convert the folder with llama.cpp's convert_hf_to_gguf.py."
        )
    chosen = _manifest_entries(artefact, manifest, ref.names)
    _check_units(chosen, shrink)
    if not allow_rejected:
        require_accepted({name: described.get("kind", "") for name, described in chosen.items()})
    _check_output(Path(output), overwrite, source, artefact)
    if gguf is not None:
        _check_gguf(gguf, source)
    found = {
        "folder": str(output),
        "gguf": None if gguf is None else str(Path(output) / _gguf_name(gguf)),
        "expert": str(ref),
        "base": str(source),
        "shrink": shrink,
    }
    if dry:
        return found
    moe = FreeMoE.from_pretrained(base, artefact, dtype=dtype, device=device)
    ref, names = _read_names(expert, op, moe.experts), []
    for number, part in enumerate(ref.names):
        place, other = _split_folder_name(part, moe.experts)
        names += [part] if place is None else moe.load_expert(place, other, prefix=f"part {number}:")
    # Under it all are one expert of the mixture.
    name = str(ExpertRef(tuple(names), ref.operation))
    if shrink:
        folder = write_shrunk(moe, name, output, pad=pad, overwrite=overwrite)
        return {**found, "weights_off": None, "bytes": _file_sizes(folder)}
    off = moe.expert_mask(name).count

    def write_gguf_file(folder: Path) -> None:
        if gguf is not None:
            write_gguf(moe.model, folder / _gguf_name(gguf), gguf, Path(source))

    folder = moe.merge_and_save(name, output, also=write_gguf_file, overwrite=overwrite, allow_rejected=allow_rejected)
    return {**found, "weights_off": off, "bytes": _file_sizes(folder)}


def _read_names(expert: str | Sequence[str], op: str | None, known: Sequence[str]) -> ExpertRef:
    """The experts that are named, and how they are combined; also where one name says both: ``a+b``."""
    names = (expert,) if isinstance(expert, str) else tuple(expert)
    if len(names) == 1 and op is not None:
        raise RecipeError(
            f"--op {op} combines several experts, and {names[0]!r} is one. Name at least 2, or leave --op out."
        )
    if len(names) == 1:
        # The path of another artefact may hold any sign.
        return ExpertRef(names) if _split_folder_name(names[0], known)[0] else ExpertRef.parse(names[0])
    if op not in SIGNS.values():
        how = "Say how they are combined" if op is None else f"--op is {op!r}"
        raise RecipeError(
            f"{len(names)} experts are named. {how}: --op union (what any of them has off is off) or --op intersection."
        )
    return ExpertRef(names, cast("Operation", op))


def _split_folder_name(name: str, known: Sequence[str]) -> tuple[str | None, str]:
    """The folder and the name of an expert of another artefact, ``FOLDER:NAME``; None for one of this artefact."""
    if name not in known:
        for at in (i for i, sign in enumerate(name) if sign == ":"):
            if (Path(name[:at]) / MANIFEST).is_file():
                return name[:at], name[at + 1 :]
    return None, name


def _file_sizes(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.is_file()}


def _check_output(output: Path, overwrite: bool, source: str, artefact: str | Path) -> None:
    """Raise where a folder may not be written: it is there, or base or artefact are inside of it."""
    if output.exists() and not overwrite:
        raise ArtifactError(f"{str(output)!r} exists already. Choose another -o, or --overwrite to replace it.")
    for held in (Path(source).resolve(), Path(artefact).resolve()):
        if output.resolve() in (held, *held.parents):
            raise ArtifactError(f"{str(output)!r} holds {str(held)!r}, which is merged; choose another -o.")


def _check_gguf(gguf: str, source: str) -> None:
    require_file_type(gguf)
    if not is_gguf(source):
        raise DataError(
            f"--gguf copies tokenizer and metadata from the base's own GGUF file, and the base {source!r} is none. Merge "
            "without --gguf, and convert the folder with llama.cpp's convert_hf_to_gguf.py."
        )


def _manifest_entries(
    artefact: str | Path, manifest: dict[str, Any], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """What the artefacts say of the experts that are merged, by name."""
    experts = {described["name"]: described for described in manifest.get("experts", [])}
    found = {}
    for name in names:
        folder, other = _split_folder_name(name, list(experts))
        theirs = manifest if folder is None else read_manifest(folder)
        if theirs.get("base_fingerprint") != manifest.get("base_fingerprint"):
            raise ArtifactError(
                f"{str(artefact)!r} and {folder!r} were made for two bases ({manifest['base_model_name_or_path']!r} and "
                f"{theirs['base_model_name_or_path']!r}, fingerprints {manifest['base_fingerprint'][:12]} and "
                f"{theirs['base_fingerprint'][:12]}); what is off in one means nothing in the other."
            )
        here = experts if folder is None else {d["name"]: d for d in theirs.get("experts", [])}
        # The base is no part of a combination.
        allowed = [BASE, *here] if len(names) == 1 else list(here)
        if other not in allowed and manifest.get("kind") == KIND:
            raise unknown_name(
                "expert",
                other,
                allowed,
                "A merged model is one expert, or several with --op; the router is not part of it.",
            )
        found[name] = here.get(other, {})
    return found


def _check_units(chosen: dict[str, dict[str, Any]], shrink: bool) -> None:
    """Raise unless experts can be cut out, or said by zeros."""
    for name, described in chosen.items():
        if shrink:
            require_units(name, described.get("kind", BASE))
        else:
            require_zeros_say(name, described.get("unit"))
    kinds = {described["unit"]: name for name, described in chosen.items() if shrink}
    if len(kinds) > 1:
        said = ", ".join(f"{name!r} has units of kind {unit!r}" for unit, name in kinds.items())
        raise RecipeError(f"--shrink cuts units of one kind out: {said}. Merge them without --shrink.")


def _gguf_name(file_type: str) -> str:
    return f"model-{file_type}.gguf"
