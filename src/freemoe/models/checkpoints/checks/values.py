"""What a loaded base's numbers and settings must be: finite, floating, of the shapes that its config says."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from freemoe.compat.transformers import is_quantised
from freemoe.core.errors import DataError
from freemoe.models.checkpoints.checks.whole import format_shape
from freemoe.models.checkpoints.identity import settings_of
from freemoe.models.gates import EXPERT_COUNTS
from freemoe.models.offload import named_values

log = logging.getLogger(__name__)

_CHUNK = 1 << 22

_RANGES = {
    "eps": (0.0, 1.0),
    "epsilon": (0.0, 1.0),
    "rope_theta": (1e-6, math.inf),
    "rope_local_base_freq": (1e-6, math.inf),
    # Some configurations write 0 where there is none.
    "sliding_window": (0, math.inf),
    "max_position_embeddings": (1, math.inf),
    "softcapping": (1e-6, math.inf),
}
"""End of a setting's name -> what a model can compute with."""

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
"""How configurations name the number of experts that a token is given."""


def require_sound(source: Any, model: Any) -> None:
    """Refuse a base with a number that is none.

    Every parameter is read once, in parts of 4M numbers: about a tenth of what the fingerprint costs, and for layers on disk one
    pass over their files.

    Raises:
        DataError: A weight is NaN, infinite, an integer or of another shape than the model's; or a setting is NaN or infinite.
    """
    _require_settings(source, settings_of(model.config))
    head = model.get_output_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and head is not None and head.weight is not model.get_input_embeddings().weight and not head.weight.is_meta:
        log.warning(
            "the config.json of %s says that head and embeddings are one, and its files hold two: both are used as they are",
            source,
        )
    for name, buffer in model.named_buffers():
        # Masks may hold infinity.
        wrong = buffer.isfinite().logical_not() if name.endswith("inv_freq") else buffer.isnan()
        if not buffer.is_meta and buffer.is_floating_point() and bool(wrong.any()):
            raise DataError(
                f"The base model {str(source)!r} has NaN or infinity in {name!r}, which its files or config.json set. Every answer "
                "would be noise. Copy the model again."
            )
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    quantised = is_quantised(model)
    for name, values in named_values(model):
        if quantised and not values.is_floating_point():
            continue
        if tuple(values.shape) != wanted[name]:
            raise DataError(
                f"The base model {str(source)!r} is not whole: {name!r} is {format_shape(values.shape)} in its files and "
                f"{format_shape(wanted[name])} by its config.json. Check config.json, or copy the model again."
            )
        if not values.is_floating_point():
            raise DataError(
                f"The base model {str(source)!r} has {name!r} as {values.dtype}, and weights are floating-point numbers."
            )
        if not _is_finite(values):
            raise DataError(
                f"The base model {str(source)!r} has NaN or infinity in {name!r} (as {values.dtype}). Every answer would be "
                "noise. Copy the model again; if its files are whole, load it in another dtype (--dtype float32)."
            )


def _require_settings(source: Any, settings: Mapping[str, Any]) -> None:
    """Raise for a setting with which no answer means anything."""
    for name, value in settings.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        last = name.rpartition(".")[2]
        allowed = next((ends for ending, ends in _RANGES.items() if last.endswith(ending)), None)
        wild = isinstance(value, float) and not math.isfinite(value) and "limit" not in name
        if wild or (allowed is not None and not allowed[0] <= value <= allowed[1]):
            said = "" if allowed is None else f", allowed: {allowed[0]:g} to {allowed[1]:g}"
            raise DataError(
                f"The base model {str(source)!r} has {name} = {value} in its config.json{said}. Every answer would be noise. Copy the "
                "model again."
            )
    for path in {name.rpartition(".")[0] for name in settings}:
        chosen, counts = (
            [settings.get(f"{path}.{n}" if path else n) for n in names] for names in (_CHOSEN, EXPERT_COUNTS)
        )
        for k, count in itertools.product(chosen, counts):
            if isinstance(k, int) and isinstance(count, int) and count > 0 and not 1 <= k <= count:
                raise DataError(
                    f"The base model {str(source)!r} gives a token {k} of {count} experts by its config.json; allowed: 1 to "
                    f"{count}. Copy the model again."
                )


def require_tokenizer(source: Any, model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer whose own tokens lie beyond the embedding; tokens that were added to it may.

    Raises:
        DataError: It is another model's.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    added = set(tokenizer.get_added_vocab())
    beyond = [token for token, n in tokenizer.get_vocab().items() if n >= rows and token not in added]
    if beyond:
        raise DataError(
            f"The base model {str(source)!r} has embeddings for {rows:,} tokens, and its tokenizer has {len(beyond):,} beyond "
            f"them, such as {min(beyond)!r}: it is another model's. Copy the model's own tokenizer beside it."
        )


def _is_finite(values: Tensor) -> bool:
    flat = values.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        # Numbers of 8 bits know no minimum.
        part = part.float() if part.element_size() == 1 else part
        if not all(math.isfinite(end) for end in (float(end) for end in torch.aminmax(part))):
            return False
    return True
