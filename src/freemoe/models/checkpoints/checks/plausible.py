"""A model's folder before anything is made of it: files that can be read, and a config that its weights can fill.

transformers builds what a config says before it looks at the weights: a config of a billion layers is built for hours, and
a pipe in place of a file is waited for for ever. Only small files and headers are read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from freemoe.core.errors import DataError
from freemoe.core.untrusted import read_json, require_file, validate_strict, walk_values

Header = dict[str, tuple[str, int]]
"""Of a weight file: tensor -> its type, as the file names it, and how many numbers it has."""

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

HALVES = ("encoder_layers", "decoder_layers")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "n_embd", "d_model")

LARGEST = 2**31
"""Of the whole numbers of a config but one: none has more dimensions, tokens or heads."""

UNLIMITED = "model_max_length"
"""Of a tokenizer, which says so by a number of thirty digits."""

_FEW = 1 << 24
"""Weights that are drawn in no time."""

_Few = Annotated[int, Field(ge=1, le=64)] | None
_Size = Annotated[int, Field(ge=0, le=LARGEST)] | None
_Tokens = int | list[int] | None


def require_plausible(source: str, folder: Path, headers: Mapping[Path, Header]) -> None:
    """Refuse a folder that no model can be read from, before the model is built; ``headers`` of its weight files.

    Raises:
        DataError: With the file, the value seen and what to do.
    """
    files = sorted({path for pattern in READ for path in folder.glob(pattern)})
    for path in files:
        require_file(path)
    said = {name: read_json(folder / name, finite=False) for name in MAPPINGS if (folder / name).is_file()}
    for name, held in said.items():
        if not isinstance(held, dict):
            raise damaged_model_error(source, f"{name} holds a JSON {type(held).__name__}, and an object is needed")
    validate_strict(
        GenerationSettings, said.get("generation_config.json", {}), f"generation_config.json of {source!r:.200}"
    )
    config = said.get("config.json", {})
    for key, value in _config_integers(config):
        if key != UNLIMITED and abs(value) > LARGEST:
            raise damaged_model_error(
                source, f"config.json has {key} {value:.3g}, and no model has more than {LARGEST:,}"
            )
        # A model of two halves may have one alone.
        if key in LAYERS and value < (0 if key in HALVES else 1):
            raise damaged_model_error(
                source, f"config.json has {key} {value}, and without layers every answer would be noise"
            )
    tensors, numbers = sum(map(len, headers.values())), _count_numbers(headers)
    # Whether the tensors of the files could fill the config's layers and sizes.
    for key, value in _config_integers(config) if headers else ():
        if key in LAYERS and value > max(tensors, 1):
            raise damaged_model_error(
                source, f"config.json has {key} {value:,}, and its files hold {tensors:,} tensors"
            )
        # Packed numbers are up to 32 in one.
        if key in SIZES and value > 32 * max(numbers, 1):
            raise damaged_model_error(
                source, f"config.json has {key} {value:,}, and its files hold {numbers:,} numbers"
            )


def require_fillable(source: str, folder: Path, headers: Mapping[Path, Header]) -> None:
    """Refuse weights that are far too few for their config: transformers would draw all the rest at random, for minutes.

    A model whose weights are packed or in other files is not judged.

    Raises:
        DataError: With both numbers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder))
    if not headers or getattr(config, "quantization_config", None):
        return
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    wanted = sum(parameter.numel() for parameter in empty.parameters())
    held = _count_numbers(headers)
    if wanted > 2 * held + _FEW:
        raise damaged_model_error(
            source,
            f"by config.json ({config.model_type}) it has {wanted:,} weights, and its files hold {held:,}. Check model_type and the "
            "sizes in config.json",
        )


class GenerationSettings(BaseModel):
    """What of a generation_config.json is read when a text is generated: a wild number there hangs, or takes all memory."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    num_beams: _Few = None
    num_beam_groups: _Few = None
    num_return_sequences: _Few = None
    no_repeat_ngram_size: _Size = None
    encoder_no_repeat_ngram_size: _Size = None
    top_k: _Size = None
    max_length: _Size = None
    max_new_tokens: _Size = None
    min_length: _Size = None
    min_new_tokens: _Size = None
    max_time: float | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    length_penalty: float | None = None
    do_sample: bool | None = None
    use_cache: bool | None = None
    bos_token_id: _Tokens = None
    eos_token_id: _Tokens = None
    pad_token_id: _Tokens = None
    decoder_start_token_id: _Tokens = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    forced_bos_token_id: _Tokens = None
    forced_eos_token_id: _Tokens = None
    bad_words_ids: list[list[int]] | None = None
    force_words_ids: list[Any] | None = None


def _config_integers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every whole number of a config with its key, also of the configs in it."""
    for part in (held for _, held in walk_values(config) if isinstance(held, dict)):
        yield from ((key, value) for key, value in part.items() if isinstance(value, int))


def _count_numbers(headers: Mapping[Path, Header]) -> int:
    return sum(numbers for header in headers.values() for _, numbers in header.values())


def damaged_model_error(source: str, what: str) -> DataError:
    """The error of a model whose files are not as they must be."""
    return DataError(f"The base model {source!r:.200} could not be loaded: {what}. Copy the model again.")
