"""What a folder's weight files say in their headers: that every tensor is there once, and of a type that can be computed with.

transformers turns integers and numbers of 8 bits into floats without their scales, and takes one of two tensors of a name.
Only headers are read, which takes milliseconds whatever the size of the model.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
from pathlib import Path
from typing import Any

from freemoe.compat.transformers import is_quantised
from freemoe.core.errors import DataError, FamilyError
from freemoe.models.checkpoints.checks.headers import INDEX, SINGLE, stored_tensors, weight_files
from freemoe.models.checkpoints.checks.load_report import format_tensors
from freemoe.models.checkpoints.gguf_header import GGUFHeader, is_gguf, read_header
from freemoe.models.spec import family_of, find_layers

log = logging.getLogger(__name__)

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
_BLOCK = re.compile(r"blk\.(\d+)\.")

_GGUF_INTEGERS = ("I8", "I16", "I32", "I64")


def require_plain_files(source: Any, model: Any, path: Path) -> None:
    """Refuse files whose tensors are integers where weights are needed, or are there twice.

    A model that is quantised says itself how its numbers are read.

    Raises:
        DataError: A weight is stored as integers or in 8 bits without a quantisation that says how; one is in two files.
    """
    if is_gguf(path):
        header = read_header(path)
        _require_used(source, header, model)
        odd = [f"{name}: {kind}" for name, kind in header.types.items() if kind in _GGUF_INTEGERS]
    else:
        kinds, where = dict[str, str](), dict[str, str]()
        for file in _weight_files(source, path):
            for name, kind in _tensor_types(source, file).items():
                if name in where:
                    raise DataError(
                        f"The base model {str(source)!r} has the tensor {name!r} in {where[name]!r} and in {file.name!r}; which of "
                        "them counts, nothing says. Copy the model again."
                    )
                kinds[name], where[name] = kind, file.name
        odd = _odd_weights(kinds, model)
    if odd and not is_quantised(model):
        raise DataError(
            f"The base model {str(source)!r} stores {format_tensors(odd)} as integers or in 8 bits, and its config.json does not say "
            "how they are turned into weights. Copy the model again, with its quantization_config, or dequantise it."
        )


def _require_used(source: Any, header: GGUFHeader, model: Any) -> None:
    """Raise where a GGUF file says more than the model does: transformers leaves that out without a word."""
    scaling = {key.removeprefix(f"{header.architecture}.rope."): value for key, value in header.values.items()}
    factor = scaling.get("scaling.factor", scaling.get("scale_linear", 1.0))
    rope = getattr(model.config, "rope_parameters", None) or {}
    if scaling.get("scaling.type", "linear") != "none" and factor not in (0, 1) and rope.get("rope_type") == "default":
        raise DataError(
            f"The base model {str(source)!r} scales its rotary embedding ({scaling.get('scaling.type', 'linear')}, by {factor:g}), which "
            "the reader of GGUF files leaves out: it would be another model. Give the model's original folder."
        )
    try:
        layers = find_layers(model, family_of(model))[1]
    except FamilyError:
        return
    held: dict[int, list[str]] = {}
    for name in header.shapes:
        if match := _BLOCK.match(name):
            held.setdefault(int(match[1]), []).append(name)
    beyond = sorted(n for n in held if n >= len(layers))
    vectors = {n: [x for x in names if len(header.shapes[x]) == 1] for n, names in held.items()}
    more = [
        f"{sum(math.prod(header.shapes[x]) for x in vectors[n])} numbers of norms and biases in layer {n}, and the model has {own}"
        for n, layer in enumerate(layers)
        if n in held
        and (own := sum(t.numel() for t in layer.state_dict().values() if t.ndim == 1))
        < sum(math.prod(header.shapes[x]) for x in vectors[n])
    ]
    if beyond or more:
        what = f"layer {beyond[0]}, and the model has {len(layers)} layers" if beyond else more[0]
        raise DataError(
            f"The base model {str(source)!r} is not whole: the file has {what} by its metadata ({header.architecture!r}). Without "
            "them it would be another model. Copy or convert it again."
        )


def _weight_files(source: Any, folder: Path) -> list[Path]:
    """The weight files that transformers reads of a folder, in its order of preference."""
    for single, index in ((SINGLE, INDEX), (PICKLED, PICKLED_INDEX)):
        if (folder / single).is_file() and (folder / index).is_file():
            log.warning(
                "%s holds both %s and %s; the first is read. If that is an older model, remove it.",
                folder,
                single,
                index,
            )
        if found := weight_files(source, folder, single, index):
            return found
    return []


def _tensor_types(source: Any, path: Path) -> dict[str, str]:
    """Tensor -> name of its type."""
    if path.suffix == ".safetensors":
        return {name: kind for name, (kind, _) in stored_tensors(source, path).items()}
    import torch

    try:
        held = torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, pickle.UnpicklingError):
        return {}  # of a form that cannot be looked into without reading it
    return {k: str(v.dtype).removeprefix("torch.") for k, v in held.items() if isinstance(v, torch.Tensor)}


def _odd_weights(kinds: dict[str, str], model: Any) -> list[str]:
    """Those tensors of files that are no floats and become a parameter, also where they are one of several that are fused."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    odd = []
    for name, kind in kinds.items():
        names = {name, f"{model.base_model_prefix}.{name}"}
        if kind not in _FLOATS and (names & parameters or (name.endswith(".weight") and not names & buffers)):
            odd.append(f"{name}: {kind}")
    return odd
