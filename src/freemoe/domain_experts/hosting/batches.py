"""Batches for a base whose sequences belong to several experts: groups, padding, results put together again.

Shapes: B sequences, L tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import DataError

FORWARD_ALONE = {
    "past_key_values": None,
    "labels": None,
    "output_hidden_states": False,
    "output_attentions": False,
    "return_dict": True,
}
"""What a forward pass of several experts cannot give, and the value at which it is not asked for."""

GENERATE_ALONE = {"past_key_values": None, "streamer": None, "return_dict_in_generate": False}
"""The same of a generation."""


def select_rows(inputs: dict[str, Any], rows: list[int], size: int) -> dict[str, Any]:
    """The rows of every input that has one row per sequence."""
    return {
        # What has one dimension (logits_to_keep, cache_position) counts positions, not sequences.
        k: v[rows] if isinstance(v, Tensor) and v.ndim > 1 and v.shape[0] == size else v
        for k, v in inputs.items()
    }


def drop_none(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs that are there: generate takes no ids of None."""
    return {k: v for k, v in inputs.items() if v is not None}


def batch_size(inputs: dict[str, Any]) -> int:
    """Sequences of a batch of ids or of embeddings; 0 where there is neither."""
    return next((len(v) for k in ("input_ids", "inputs_embeds") if (v := inputs.get(k)) is not None), 0)


def with_positions(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of a forward pass; with padding at the left, every token is counted from its sequence's first one.

    Transformers does so when it generates, and not in a plain forward pass: there a token's position counts the padding, which
    changes what models with learned positions answer. Rotary ones answer the same either way, and are left alone.
    """
    mask = inputs.get("attention_mask")
    if (
        not isinstance(mask, Tensor)
        or mask.ndim != 2
        or inputs.get("position_ids") is not None
        or inputs.get("past_key_values") is not None
        or bool(mask[:, 0].all())
        or "position_ids" not in inspect.signature(model.forward).parameters
        or any("rotary" in name for name, _ in model.named_modules())
    ):
        return inputs
    return {**inputs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def left_padded(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of a generation with all padding at the left: after padding at the right nothing can be continued.

    Inputs are ``input_ids`` or ``inputs_embeds`` ``(B, L, ...)``, and what else goes with each token; where there is no
    mask, the generation config's padding token says what padding is.
    """
    tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
    mask = inputs.get("attention_mask")
    if tokens is None or tokens.ndim < 2 or not tokens.shape[1] or inputs.get("past_key_values") is not None:
        return inputs
    if mask is None:
        mask = _mask_of(model, inputs, tokens)
    if mask is None or mask.shape != tokens.shape[:2] or bool(mask[:, -1].all()):
        return inputs
    length = mask.shape[1]
    places = torch.arange(length, device=mask.device)
    last = torch.where(mask.bool(), places, -1).amax(1)
    # A row of nothing but padding stays as it is.
    shift = torch.where(last >= 0, length - 1 - last, 0)
    order = (places[None] - shift[:, None]) % length
    moved = {
        k: v[torch.arange(len(v), device=v.device)[:, None], order.to(v.device)]
        for k, v in {**inputs, "attention_mask": mask}.items()
        if isinstance(v, Tensor) and v.ndim > 1 and v.shape[:2] == mask.shape
    }
    return {**inputs, **moved}


def _mask_of(model: Any, inputs: dict[str, Any], tokens: Tensor) -> Tensor | None:
    """The mask of ids that end in padding, as transformers would guess it."""
    pad, ends = special_tokens(model, inputs)
    if tokens.ndim != 2 or tokens.is_floating_point() or pad is None or pad in ends:
        return None
    return tokens.ne(pad).long() if bool(tokens[:, -1].eq(pad).any()) else None


def special_tokens(model: Any, inputs: dict[str, Any]) -> tuple[int | None, list[int]]:
    """The padding token and the tokens that end a sequence, as a generation with these inputs has them."""
    found = []
    for name in ("pad_token_id", "eos_token_id"):
        asked = inputs.get(name, getattr(inputs.get("generation_config"), name, None))
        asked = getattr(model.generation_config, name, None) if asked is None else asked
        asked = asked.tolist() if isinstance(asked, Tensor) else asked
        found.append([] if asked is None else asked if isinstance(asked, list) else [asked])
    pads, ends = found
    return (pads[0] if pads else None), ends


def merge_generated(parts: Sequence[tuple[list[int], Tensor]], pad: int | None) -> Tensor:
    """Put generated groups together in the batch's order; what ended early is padded at its end.

    A part is rows of the batch, and ``(n * rows, length)`` token ids of n sequences for each.

    Raises:
        DataError: Lengths differ and there is nothing to fill up with.
    """
    longest = max(out.shape[1] for _, out in parts)
    if pad is None and any(out.shape[1] < longest for _, out in parts):
        raise DataError(
            "The sequences of this batch end at different lengths, and neither a padding token nor one that ends a sequence is "
            "known to fill them up. Pass pad_token_id= to generate."
        )
    size = sum(len(rows) for rows, _ in parts)
    each = len(parts[0][1]) // len(parts[0][0])
    result = parts[0][1].new_full((size, each, longest), 0 if pad is None else pad)
    for rows, out in parts:
        result[rows, :, : out.shape[1]] = out.view(len(rows), each, -1)
    return result.flatten(0, 1)


def needing_one(inputs: dict[str, Any], refused: dict[str, Any]) -> list[str]:
    """Inputs that calls of one expert each cannot give together.

    ``refused``: name of an input -> the value at which it asks for nothing.
    """
    return [name for name, idle in refused.items() if inputs.get(name, idle) not in (idle, None)]


def require_one_expert(wrong: list[str], experts: int) -> None:
    """Raise where an input works for one expert only. ``wrong`` is from `needing_one`.

    Raises:
        DataError: Names the inputs.
    """
    if wrong:
        raise DataError(
            f"This batch has {experts} experts, and {', '.join(wrong)} needs one: call it once per expert, with that expert's "
            "sequences alone, or with strategy='fused' in one pass."
        )
