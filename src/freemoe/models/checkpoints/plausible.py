"""A model's folder before anything is made of it: files that can be read, and a config that its weights can fill.

transformers builds what a config says before it looks at the weights: a config of a billion layers is built for hours, and
a pipe in place of a file is waited for for ever. Only small files and headers are read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.untrusted import parse_json, read_json, require_file, walk

READ = ("*.json", "*.safetensors", "*.bin", "*.jinja", "*.model", "*.txt")
"""What of a folder transformers may open."""

MAPPINGS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
)
"""Files that hold a JSON object."""

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
"""What configs call the number of their layers."""

LARGEST = 2**31
"""Of the whole numbers of a config but one: none has more dimensions, tokens or heads."""

UNLIMITED = "model_max_length"
"""Of a tokenizer, which says so by a number of thirty digits."""

INDEX = "model.safetensors.index.json"

_FEW = 1 << 24
"""Weights that are drawn in no time."""

MOST_HEADER = 100_000_000
"""Bytes of the header of a weight file; what the format's own reader allows."""


def require_plausible(source: Any, folder: Path, weights: bool = True) -> None:
    """Refuse a folder that no model can be read from, before the model is built.

    Args:
        source: What was asked for, for the message.
        folder: Of the model.
        weights: Whether its weight files are there.

    Raises:
        DataError: With the file, the value seen and what to do.
    """
    files = sorted({path for pattern in READ for path in folder.glob(pattern)})
    for path in files:
        require_file(path)
    said = {name: read_json(folder / name, finite=False) for name in MAPPINGS if (folder / name).is_file()}
    for name, held in said.items():
        if not isinstance(held, dict):
            raise _damaged(source, f"{name} holds a JSON {type(held).__name__}, and an object is needed")
    _check_generation(source, said.get("generation_config.json", {}))
    config = said.get("config.json", {})
    _check_numbers(source, config)
    # What is fetched for its tokenizer alone may have an index of weights that are not there.
    shards = _shards(source, folder, files) if weights or not (folder / INDEX).is_file() else []
    if shards:
        headers = [_header(source, path) for path in shards]
        _check_size(source, config, headers)


def require_fillable(source: Any, folder: Path) -> None:
    """Refuse weights that are far too few for their config: transformers would draw all the rest at random, for minutes.

    Args:
        source: What was asked for, for the message.
        folder: Of the model; one whose weights are packed or in other files is not judged.

    Raises:
        DataError: With both numbers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shards = _shards(source, folder, sorted(folder.glob("*.safetensors")))
    config = AutoConfig.from_pretrained(str(folder))
    if not shards or getattr(config, "quantization_config", None):
        return
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    wanted = sum(parameter.numel() for parameter in empty.parameters())
    held = sum(sum(_header(source, path).values()) for path in shards)
    if wanted > 2 * held + _FEW:
        raise _damaged(
            source,
            f"by config.json ({config.model_type}) it has {wanted:,} weights, and its files hold {held:,}. Check model_type and the "
            "sizes in config.json",
        )


def _check_numbers(source: Any, config: Mapping[str, Any]) -> None:
    """Whole numbers that nothing can have, and a size below zero."""
    for part in (held for _, held in walk(config) if isinstance(held, dict)):
        for key, value in part.items():
            if isinstance(value, int) and key != UNLIMITED and abs(value) > LARGEST:
                raise _damaged(source, f"config.json has {key} {value:.3g}, and no model has more than {LARGEST:,}")
            if key in LAYERS and isinstance(value, int) and value < 0:
                raise _damaged(source, f"config.json has {key} {value}")


def _check_generation(source: Any, settings: Mapping[str, Any]) -> None:
    """Numbers of tokens and lists of them, which are read when the first text is generated."""
    for key, value in settings.items():
        numbers = value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and not all(n is None or isinstance(n, int) for n in numbers):
            raise _damaged(source, f"generation_config.json has {key} {value!r:.80}, and a number of a token is needed")
        if key.endswith(("_words_ids", "_tokens_ids", "suppress_tokens")) and not isinstance(value, list | None):
            raise _damaged(source, f"generation_config.json has {key} {value!r:.80}, and a list is needed")


def _shards(source: Any, folder: Path, files: list[Path]) -> list[Path]:
    """The weight files of a folder: the single one, or those that its index names, which lie in it."""
    index = folder / INDEX
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return [path for path in files if path.suffix == ".safetensors"]
    held = read_json(index)
    places = held.get("weight_map") if isinstance(held, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise _damaged(source, f"{INDEX} has no weight_map that says where each tensor is")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name:
            raise _damaged(source, f"{INDEX} names {name!r:.80}, which is outside of the folder")
        if not (folder / name).is_file():
            raise _damaged(source, f"{INDEX} names {name!r:.80}, which is not there")
    return [folder / name for name in names]


def _header(source: Any, path: Path) -> dict[str, int]:
    """Tensor -> numbers in it, of a safetensors file that is whole."""
    size = require_file(path)
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER):
            raise _damaged(source, f"{path.name} has {size:,} bytes and announces a header of {length:,}")
        raw = stream.read(length)
    try:
        held = parse_json(raw.decode(), f"the header of {path.name}")
        sizes = {name: math.prod(entry["shape"]) for name, entry in held.items() if name != "__metadata__"}
        end = max([entry["data_offsets"][1] for name, entry in held.items() if name != "__metadata__"], default=0)
        whole = bool(size == 8 + length + end and all(isinstance(n, int) and n >= 0 for n in sizes.values()))
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise _damaged(
            source, f"the header of {path.name} cannot be read ({type(error).__name__}: {error!s:.200})"
        ) from None
    if not whole:
        raise _damaged(source, f"{path.name} was cut short, or is longer than its header says")
    return sizes


def _check_size(source: Any, config: Mapping[str, Any], headers: list[dict[str, int]]) -> None:
    """Whether a config's layers and sizes are such that the tensors of its files could fill them."""
    tensors = sum(map(len, headers))
    numbers = sum(sum(header.values()) for header in headers)
    for key, value in _sizes(config):
        if key in LAYERS and value > max(tensors, 1):
            raise _damaged(source, f"config.json has {key} {value:,}, and its files hold {tensors:,} tensors")
        # Packed numbers are up to 32 in one.
        if key in ("vocab_size", "hidden_size", "intermediate_size", "n_embd", "d_model") and value > 32 * max(
            numbers, 1
        ):
            raise _damaged(source, f"config.json has {key} {value:,}, and its files hold {numbers:,} numbers")


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every whole number of a config with its key, also of the configs in it."""
    for part in (held for _, held in walk(config) if isinstance(held, dict)):
        yield from ((key, value) for key, value in part.items() if isinstance(value, int))


def _damaged(source: Any, what: str) -> DataError:
    return DataError(f"The base model {str(source)!r:.200} could not be loaded: {what}. Copy the model again.")
