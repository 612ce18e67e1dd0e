"""The weight files of a folder, and what they say in their headers; no weight is read.

The format is that of https://huggingface.co/docs/safetensors: the header's length in 8 bytes, the header as JSON, the tensors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.untrusted import parse_json, read_json, require_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

MOST_HEADER = 100_000_000
"""Bytes of the header of a weight file; what the format's own reader allows."""


def shards_of(source: Any, folder: Path) -> list[Path]:
    """The safetensors files of a folder: as `weight_files`, or whatever lies there."""
    return weight_files(source, folder) or sorted(folder.glob("*.safetensors"))


def weight_files(source: Any, folder: Path, single: str = SINGLE, index_name: str = INDEX) -> list[Path]:
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


def stored_tensors(source: Any, path: Path) -> dict[str, tuple[str, int]]:
    """The type of every tensor of a safetensors file, as the file names it, and how many numbers it has.

    Raises:
        DataError: No such header, or a file that is shorter or longer than it says.
    """
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


def damaged_model_error(source: Any, what: str) -> DataError:
    """The error of a model whose files are not as they must be."""
    return DataError(f"The base model {str(source)!r:.200} could not be loaded: {what}. Copy the model again.")
