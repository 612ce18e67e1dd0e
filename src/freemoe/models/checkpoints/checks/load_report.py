"""What transformers says about a checkpoint after loading it: what the file lacked, and what nothing asked for.

transformers fills a tensor that the checkpoint lacks with random numbers and only warns, and leaves out layers that the config
does not count. A search on such a model finds the experts of a model that nobody has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from freemoe.core.errors import DataError, FamilyError
from freemoe.models.spec import family_of, find_layers

log = logging.getLogger(__name__)

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


def format_tensors(names: list[str]) -> str:
    """``2 tensors (a, b)``; the first few by name."""
    more = ", ..." if len(names) > NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:NAMED])}{more})"


def format_shape(sizes: Iterable[int]) -> str:
    """A shape as ``40x32``; a scalar is "a number"."""
    return "x".join(map(str, sizes)) or "a number"
