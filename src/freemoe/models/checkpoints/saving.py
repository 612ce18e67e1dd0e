"""Write a model as a plain Hugging Face checkpoint, a few decoder layers at a time.

``save_pretrained`` turns all fused experts back into the checkpoint's own keys before it writes the first shard, and
that is a second copy of most of a mixture model. Here it is given a few layers at a time.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor

from freemoe.core.errors import ArtifactError, DataError
from freemoe.core.files import CARD, MANIFEST, as_disk_error, notify_watchers
from freemoe.core.run.lock import output_lock
from freemoe.models.offload import stored_parameters
from freemoe.models.spec import family_of, find_layers

_WEIGHTS = ("model*.safetensors", "model-*.gguf", "pytorch_model*.bin")

_OF_CHECKPOINTS = (
    *(*_WEIGHTS, "*_config.json", "config.json", "*.index.json", "chat_template.*", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.*", "vocab.*", "merges.txt", "spiece.model", "sentencepiece.bpe.model", CARD),
)
"""What files are called that ``save_pretrained`` of a model and its tokenizer writes, and those of `merge`."""


def require_free(target: Path, overwrite: bool) -> None:
    """Raise if something stands where a checkpoint shall be written that may not be replaced."""
    if target.exists() and not overwrite:
        raise ArtifactError(f"{str(target)!r} exists already; choose another folder.")
    if target.exists() and (odd := _no_checkpoint(target)):
        raise ArtifactError(
            f"{str(target)!r} {odd}, and only a model folder such as merge writes is replaced; choose another folder, or move it "
            "away."
        )
    partial = target.with_name(target.name + ".partial")
    if (partial / "identity.json").exists():
        raise ArtifactError(f"{str(partial)!r} is an unfinished run of freemoe; choose another folder, or finish it.")


def _no_checkpoint(target: Path) -> str:
    """Why a folder is more, or less, than a plain checkpoint; empty where it is one."""
    if not target.is_dir() or not (target / "config.json").is_file():
        return "is no model folder"
    if (target / MANIFEST).exists():
        return "is an artefact of freemoe"
    held = sorted(target.iterdir())
    odd = [path.name for path in held if path.is_dir() or not any(map(path.match, _OF_CHECKPOINTS))]
    if odd:
        return f"also holds {odd[0]!r}"
    return "" if any(path.match(name) for path in held for name in _WEIGHTS) else "holds no weights"


@contextmanager
def whole_or_nothing(target: Path) -> Iterator[Path]:
    """Inside, write into the folder that is given; afterwards it stands at ``target``, in the place of what stood there.

    Raises:
        ArtifactError: The disk is full or refuses, or another process writes there; nothing is left half written.
    """
    partial = target.with_name(target.name + ".partial")
    with output_lock(target):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            yield partial
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
        except BaseException as error:
            full = as_disk_error(error, target)
            shutil.rmtree(partial, ignore_errors=True)
            if full is not None:
                raise full from error
            if isinstance(error, OSError | SafetensorError) and not isinstance(error, ArtifactError):
                raise ArtifactError(f"{str(target)!r} could not be written: {error}") from error
            raise


def save_checkpoint(
    model: Any,  # A transformers model of a known family, as it is now
    folder: Path,  # Where to write; made if it is missing
    max_shard_size: int | str = "5GB",  # Bytes, or digits and a unit: ``"5GB"``
    *,
    # Makes the tensor of a name, asked for in the order of layers; the model's own by default, which then needs no
    # values (it may be on the meta device)
    values: Callable[[str], Tensor] | None = None,
    layers: str | None = None,  # Path of the decoder layers; looked up in the model's family by default
    resume: bool = False,  # Leave shards that an earlier call, for the same model, had finished
) -> None:
    """Write config, generation config and weights; beside the model, one shard is held in memory at a time.

    A decoder layer is never taken apart before it is converted, so where one is larger than a shard, one layer is.

    Raises:
        FamilyError: The model's family, or its layers, are not known.
        DataError: ``max_shard_size`` cannot be read.
        OSError, SafetensorError: The disk is full or refuses.
    """
    state = model.state_dict()
    path = layers or find_layers(model, family_of(model))[0]
    stored = stored_parameters(model)
    made = values or (lambda name: stored[name].read_values() if name in stored else state[name])
    shards: list[Path] = []
    for number, keys in enumerate(_group_keys(path, state, max_shard_size)):
        part = folder / f"part{number}"
        if not (resume and any(part.glob("*.safetensors"))):
            _write_part(model, part, {k: made(k) for k in keys}, max_shard_size)
        shards += sorted(part.glob("*.safetensors"))
        for path in part.glob("*"):
            # Every part brings the same configuration.
            if ".safetensors" not in path.name:
                path.replace(folder / path.name)
    _finalize_shards(folder, shards, model.num_parameters())
    for part in dict.fromkeys(shard.parent for shard in shards):
        shutil.rmtree(part)


def _write_part(model: Any, part: Path, tensors: dict[str, Tensor], max_shard_size: int | str) -> None:
    """Write some tensors as a checkpoint; its folder is there when it is whole."""
    unfinished = part.with_name(f"{part.name}.unfinished")
    notify_watchers("begins", f"model {part.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(part, ignore_errors=True)
    with warnings.catch_warnings():
        # It warns of what it would read by itself.
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
        # The class's own: an expert in the weights forbids the model's, and here what is written is said by name.
        type(model).save_pretrained(model, unfinished, state_dict=tensors, max_shard_size=max_shard_size)
    # safetensors writes for the owner's eyes alone; every other file is what the umask allows.
    for shard in unfinished.glob("*.safetensors"):
        shard.chmod((unfinished / "config.json").stat().st_mode)
    notify_watchers("half", f"model {part.name}")
    unfinished.replace(part)
    notify_watchers("done", f"model {part.name}")


def _group_keys(path: str, state: Mapping[str, Tensor], max_shard_size: int | str) -> list[list[str]]:
    """Keys that are written together: whole layers up to a shard's size, and what stands outside of the layers.

    What stands outside stays together, because tied weights are found among the tensors of one call.
    """
    groups: dict[str, list[str]] = {}
    for key in state:
        inside = key.removeprefix(f"{path}.") if key.startswith(f"{path}.") else ""
        groups.setdefault(inside.split(".")[0], []).append(key)
    # Stand-ins without numbers: one "tensor" of a group's size each.
    sizes = {
        name: torch.empty(sum(state[k].nbytes for k in keys), dtype=torch.uint8, device="meta")
        for name, keys in groups.items()
    }
    try:
        split = split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_size)
    except ValueError as error:
        raise DataError(
            f"max_shard_size is {max_shard_size!r}; write bytes, or digits and a unit: '5GB'. {error}"
        ) from None
    return [[k for name in names for k in groups[name]] for names in split.filename_to_tensors.values()]


def _finalize_shards(folder: Path, shards: list[Path], parameters: int) -> None:
    """Give the shards their final names, and the index that goes with them where there are several."""
    if len(shards) == 1:
        shards[0].replace(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with safe_open(shard, "pt") as file:
            where |= dict.fromkeys(file.keys(), name)
        with shard.open("rb") as stream:
            size += shard.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")
        shard.replace(folder / name)
    index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": where}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
