"""What transformers says about a checkpoint after loading it: what the file lacked, and what nothing asked for.

transformers fills a tensor that the checkpoint lacks with random numbers and only warns. A search on such a model finds
the experts of a model that nobody has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from freemoe.core.errors import DataError

log = logging.getLogger(__name__)

NAMED = 3
"""Tensors that a message names; of the others it gives the number."""


def require_whole(source: Any, info: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that does not fill its model, and name in the log what the model has no place for.

    Tied tensors and buffers that are computed anew are on neither list of transformers'.

    Args:
        source: What was loaded, for the message.
        info: The report of ``from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)``.

    Raises:
        DataError: A tensor is missing, or has another shape than the config says.
    """
    missing = sorted(info["missing_keys"])
    unexpected = sorted(info["unexpected_keys"])
    mismatched = sorted(info["mismatched_keys"])
    faults = []
    if missing:
        faults.append(f"it lacks {_tensors(missing)}")
    if mismatched:
        shapes = [
            f"{name} ({_shape(seen)} in the file, {_shape(wanted)} by the config)" for name, seen, wanted in mismatched
        ]
        faults.append(f"its config.json has other shapes than {_tensors(shapes)}")
    if faults:
        extra = f" Its files also hold {_tensors(unexpected)} that this model has no place for." if unexpected else ""
        raise DataError(
            f"The base model {str(source)!r} is not whole: {', and '.join(faults)}.{extra} transformers would fill the gaps "
            "with random numbers. Check model_type and the number of layers in config.json, or copy the model again."
        )
    if unexpected:
        log.warning(
            "the checkpoint %r holds %s that its model has no place for and does not use; check model_type and the number "
            "of layers in config.json",
            str(source),
            _tensors(unexpected),
        )


def _tensors(names: list[str]) -> str:
    """``2 tensors (a, b)``; the first few by name."""
    more = ", ..." if len(names) > NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:NAMED])}{more})"


def _shape(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes)) or "a number"
