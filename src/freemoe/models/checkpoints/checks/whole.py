"""That a loaded model is all that its files hold, and the files all that the model needs.

transformers fills a tensor that the checkpoint lacks with random numbers and only warns, leaves out layers that the config does
not count, turns integers and numbers of 8 bits into floats without their scales, and takes one of two tensors of a name. A
search on such a model finds the experts of a model that nobody has.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from freemoe.compat.transformers import is_quantised
from freemoe.core.errors import DataError, FamilyError
from freemoe.models.checkpoints.base_files import INDEX, SINGLE, BaseFiles, weight_files
from freemoe.models.checkpoints.gguf_header import GGUFHeader
from freemoe.models.spec import family_of, find_layers

log = logging.getLogger(__name__)

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
_BLOCK = re.compile(r"blk\.(\d+)\.")

_GGUF_INTEGERS = ("I8", "I16", "I32", "I64")

NAMED = 3
"""Tensors that a message names; of the others it gives the number."""


def require_whole(source: Any, model: Any, info: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that is not this model's, and name in the log what else the model has no place for.

    Tied tensors and buffers that are computed anew are on neither list of transformers'. ``info`` is the report of
    ``from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)``.

    Raises:
        DataError: A tensor is missing, has another shape than the config says, or belongs to a decoder layer and is not used:
            the config counts fewer layers, or is of another model type.
    """
    missing = sorted(info["missing_keys"])
    unexpected = sorted(info["unexpected_keys"])
    mismatched = sorted(info["mismatched_keys"])
    # Weights and biases of decoder layers, such as the model has or beyond them: without them it computes something else.
    try:
        path = find_layers(model, family_of(model))[0]
        # A checkpoint of the bare decoder leaves out what stands before the first dot.
        starts = (f"{path}.", f"{path.removeprefix(f'{model.base_model_prefix}.')}.")
        of_layers = [name for name in unexpected if name.startswith(starts) and name.endswith((".weight", ".bias"))]
    except FamilyError:
        of_layers = []
    faults = _of_another_type(model.config)
    if missing:
        faults.append(f"it lacks {format_tensors(missing)}")
    if mismatched:
        shapes = [
            f"{name} ({format_shape(seen)} in the file, {format_shape(wanted)} by the config)"
            for name, seen, wanted in mismatched
        ]
        faults.append(f"its config.json has other shapes than {format_tensors(shapes)}")
    if of_layers and not faults:
        faults.append(f"its decoder layers have {format_tensors(of_layers)} more than its config.json says")
    if faults:
        extra = (
            f" Its files also hold {format_tensors(unexpected)} that this model has no place for." if unexpected else ""
        )
        extra = "" if of_layers == unexpected and not missing and not mismatched else extra
        raise DataError(
            f"The base model {str(source)!r} is not whole: {', and '.join(faults)}.{extra} transformers would fill gaps "
            "with random numbers and leave out the rest. Check model_type and the number of layers in config.json, or copy the "
            "model again."
        )
    if unexpected:
        log.warning(
            "the checkpoint %r holds %s that its model has no place for and does not use; check model_type in config.json",
            str(source),
            format_tensors(unexpected),
        )


def _of_another_type(config: Any) -> list[str]:
    """What speaks against the model_type: a config names its class too, and files of two types may have the same tensors."""
    import transformers

    named = config.architectures or ()
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        return [f"its config.json says architectures {named!r:.80}, and a list of names of classes is needed"]
    for name in named:
        known = getattr(getattr(transformers, name, None), "config_class", None)
        if known is not None and known.model_type != config.model_type:
            return [
                f"its config.json says model_type {config.model_type!r} and the class {name} of {known.model_type!r}"
            ]
    return []


def require_plain_files(files: BaseFiles, model: Any) -> None:
    """Refuse files whose tensors are integers where weights are needed, or are there twice.

    A model that is quantised says itself how its numbers are read.

    Raises:
        DataError: A weight is stored as integers or in 8 bits without a quantisation that says how; one is in two files.
    """
    if files.gguf is not None:
        _require_used(files.name, files.gguf, model)
        odd = [f"{name}: {kind}" for name, kind in files.gguf.types.items() if kind in _GGUF_INTEGERS]
    else:
        kinds, where = dict[str, str](), dict[str, str]()
        for path in _files_read(files):
            for name, kind in _tensor_types(files, path).items():
                if name in where:
                    raise DataError(
                        f"The base model {files.name!r} has the tensor {name!r} in {where[name]!r} and in {path.name!r}; which of "
                        "them counts, nothing says. Copy the model again."
                    )
                kinds[name], where[name] = kind, path.name
        odd = _odd_weights(kinds, model)
    if odd and not is_quantised(model):
        raise DataError(
            f"The base model {files.name!r} stores {format_tensors(odd)} as integers or in 8 bits, and its config.json does not say "
            "how they are turned into weights. Copy the model again, with its quantization_config, or dequantise it."
        )


def _require_used(source: str, header: GGUFHeader, model: Any) -> None:
    """Raise where a GGUF file says more than the model does: transformers leaves that out without a word."""
    scaling = {key.removeprefix(f"{header.architecture}.rope."): value for key, value in header.values.items()}
    factor = scaling.get("scaling.factor", scaling.get("scale_linear", 1.0))
    rope = getattr(model.config, "rope_parameters", None) or {}
    if scaling.get("scaling.type", "linear") != "none" and factor not in (0, 1) and rope.get("rope_type") == "default":
        raise DataError(
            f"The base model {source!r} scales its rotary embedding ({scaling.get('scaling.type', 'linear')}, by {factor:g}), which "
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
            f"The base model {source!r} is not whole: the file has {what} by its metadata ({header.architecture!r}). Without "
            "them it would be another model. Copy or convert it again."
        )


def _files_read(files: BaseFiles) -> list[Path]:
    """The weight files that transformers reads of a folder, in its order of preference."""
    for single, index in ((SINGLE, INDEX), (PICKLED, PICKLED_INDEX)):
        if (files.folder / single).is_file() and (files.folder / index).is_file():
            log.warning(
                "%s holds both %s and %s; the first is read. If that is an older model, remove it.",
                files.folder,
                single,
                index,
            )
        if found := weight_files(files.name, files.folder, single, index):
            return found
    return []


def _tensor_types(files: BaseFiles, path: Path) -> dict[str, str]:
    """Tensor -> name of its type."""
    if path in files.headers:
        return {name: kind for name, (kind, _) in files.headers[path].items()}
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


def format_tensors(names: list[str]) -> str:
    """``2 tensors (a, b)``; the first few by name."""
    more = ", ..." if len(names) > NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:NAMED])}{more})"


def format_shape(sizes: Iterable[int]) -> str:
    """A shape as ``40x32``; a scalar is "a number"."""
    return "x".join(map(str, sizes)) or "a number"
