"""The files of a base, found by its name (a folder, a GGUF file, a repository of the hub), and their headers; no weight is read.

The format of a header is that of https://huggingface.co/docs/safetensors: its length in 8 bytes, JSON, then the tensors.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from freemoe.assets import BUNDLED, BUNDLED_MOE, demo_model_path, demo_moe_path
from freemoe.core.errors import DataError, HubError
from freemoe.core.untrusted import parse_json, read_json, require_file
from freemoe.hub.fetch import HubAccess, fetch_model
from freemoe.models.checkpoints.checks.plausible import Header, damaged_model_error, require_plausible
from freemoe.models.checkpoints.gguf_header import GGUFHeader, is_gguf, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

MOST_HEADER = 100_000_000
"""Bytes of the header of a weight file; what the format's own reader allows."""


@dataclass(frozen=True)
class BaseFiles:
    """Where a base lies, and what its files say of its weights."""

    name: str  # As it was asked for
    folder: Path
    is_local: bool = True  # Rather than fetched from the hub
    gguf: GGUFHeader | None = None  # Of the file that it is, where it is one
    headers: dict[Path, Header] = field(default_factory=dict)  # Of its safetensors files

    @property
    def arguments(self) -> dict[str, str]:
        """By which transformers finds it."""
        file = {} if self.gguf is None else {"gguf_file": Path(self.name).name}
        return {"pretrained_model_name_or_path": str(self.folder), **file}

    def error_reason(self, error: Exception) -> str:
        """What transformers said; of a GGUF also the architecture, which is the usual reason."""
        if self.gguf is None:
            return f"{type(error).__name__}: {error!s:.600}"
        said = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        return (
            f"{said} (a GGUF of architecture {self.gguf.architecture!r}; those that can be read are the ones that "
            "transformers dequantises. Give the model's original folder instead.)"
        )


def find_base_files(
    model: str | Path, revision: str | None = None, access: HubAccess | None = None, weights: bool = True
) -> BaseFiles:
    """Find a base's files, fetch those that are on the hub, and read their headers; without ``weights`` tokenizer and config do.

    Raises:
        DataError: There is no such model, or one of its files is not as it must be.
        HubError: It is neither in the cache nor in reach.
    """
    name = str(model)
    if is_gguf(model):
        return BaseFiles(name, Path(model).parent, gguf=read_header(model))
    folder = local = _local_folder(model)
    if folder is None:
        try:
            folder = fetch_model(name, replace(access or HubAccess(), revision=revision), weights=weights)
        except HubError as error:
            here = "" if "/" in name else f"There is no folder {f'./{name}'!r} here. "
            raise HubError(f"{here}The base model {name!r} could not be loaded. {error}") from error
    headers = {}
    # What is fetched for its tokenizer alone may have an index of weights that are not there.
    if weights or not (folder / INDEX).is_file():
        paths = weight_files(name, folder) or sorted(folder.glob("*.safetensors"))
        headers = {path: _stored_tensors(name, path) for path in paths}
    require_plausible(name, folder, headers)
    return BaseFiles(name, folder, local is not None, None, headers)


def weight_files(source: str, folder: Path, single: str = SINGLE, index_name: str = INDEX) -> list[Path]:
    """The weight files of a folder in one format: the single one, or those that its index names; none without either.

    Raises:
        DataError: The index names no file, one elsewhere, or one that is not there.
    """
    index = folder / index_name
    if (folder / single).is_file():
        return [folder / single]
    if not index.is_file():
        return []
    held = read_json(index)
    places = held.get("weight_map") if isinstance(held, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise damaged_model_error(source, f"{index.name} has no weight_map that says where each tensor is")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name:
            raise damaged_model_error(source, f"{index.name} names {name!r:.80}, which is outside of the folder")
        if not (index.parent / name).is_file():
            raise damaged_model_error(source, f"{index.name} names {name!r:.80}, which is not there")
    return [index.parent / name for name in names]


def _stored_tensors(source: str, path: Path) -> Header:
    """The header of a safetensors file, which must be as long as it says."""
    size = require_file(path)
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER):
            raise damaged_model_error(source, f"{path.name} has {size:,} bytes and announces a header of {length:,}")
        raw = stream.read(length)
    try:
        held = parse_json(raw.decode(), f"the header of {path.name}")
        held.pop("__metadata__", None)
        tensors = {name: (entry["dtype"], math.prod(entry["shape"])) for name, entry in held.items()}
        end = max([entry["data_offsets"][1] for entry in held.values()], default=0)
        whole = size == 8 + length + end and all(isinstance(n, int) and n >= 0 for _, n in tensors.values())
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise damaged_model_error(
            source, f"the header of {path.name} cannot be read ({type(error).__name__}: {error!s:.200})"
        ) from None
    if not whole:
        raise damaged_model_error(source, f"{path.name} was cut short, or is longer than its header says")
    return tensors


def _local_folder(model: str | Path) -> Path | None:
    """A base's folder: a bundled model's for its alias, or a checked one; None of what is on the hub."""
    bundled = {BUNDLED: demo_model_path, BUNDLED_MOE: demo_moe_path}
    if str(model) in bundled:
        try:
            return bundled[str(model)]()
        except FileNotFoundError as error:
            raise DataError(f"{model!r} is not part of this installation: {error}.") from None
    path = Path(model)
    looks_local = path.is_absolute() or str(model).startswith(".") or path.exists() or str(model).count("/") > 1
    if not looks_local:
        return None
    if not os.path.exists(path / "config.json"):  # noqa: PTH110
        held = [str(p) for p in sorted(path.glob("*.gguf"))] if path.is_dir() else []
        hint = f" It holds a GGUF file: give its path, {held[0]}" if held else ""
        raise DataError(
            f"{str(model)!r} is not a model folder: it has no config.json. Give a folder written by save_pretrained, a GGUF "
            f"file, or a hub id such as meta-llama/Llama-2-7b-chat-hf.{hint}"
        )
    return path
