"""Memory of what a forward pass keeps for its backward pass, and batches cut so that it stays small.

How a batch is cut depends on the model, the batch and the number format only, never on the memory at hand: the same build gives
the same gradients everywhere. What adapts to the machine is checkpointing, which changes no number.

Shapes: B rows of a batch, L its longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from freemoe.compat.transformers import attention_of
from freemoe.core.memory import free_now
from freemoe.domain_experts.purify.batches import AnswerBatch
from freemoe.evals.engine.output_head import forward_to_head
from freemoe.models.checkpoints.placement import free_bytes

LEAST = 3 << 28
"""Activations that a pass may hold however small the model is, in bytes: cutting further would save nothing that counts."""

# Tokens of the row that is measured.
_SAMPLE = 256
# A model of so few bytes a token is not worth measuring: thousands of tokens fit anyway.
_SMALL = 1 << 17
# Inputs and outputs of all matrices stand for about this part of what is kept, at the least.
_SAFETY = 4
# What eager attention keeps of its L x L scores: before the softmax, behind it, and cast.
_SCORES = 3

_KNOWN: WeakKeyDictionary[nn.Module, dict[torch.dtype, float]] = WeakKeyDictionary()


def bytes_per_token(model: Any, length: int = _SAMPLE) -> float:
    """Bytes that autograd keeps for each token of rows of a length, without checkpointing.

    Measured once per model and dtype by the difference of two short rows, so that what is kept once (say, weights in another
    dtype) does not count. It asks for gradients of some weight; without any, nothing is kept and nothing remembered.
    """
    known = _KNOWN.setdefault(model, {})
    found = known.get(model.dtype)
    if found is None:
        found = _upper_bound_bytes(model)
        if found > _SMALL:
            longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _SAMPLE
            size = max(2, min(_SAMPLE, longest))
            found = (_saved_bytes(model, size) - _saved_bytes(model, size // 2)) / (size - size // 2)
            # What two short rows leave behind is torn to pieces, and would lie below all that follows.
            free_now()
        if found > 0:
            known[model.dtype] = found
    return found + _eager_score_bytes(model) * max(0, length - _SAMPLE)


def is_measured(model: Any) -> bool:
    """Whether `bytes_per_token` knows its answer."""
    return model.dtype in _KNOWN.get(model, {})


def _upper_bound_bytes(model: nn.Module) -> float:
    """Bytes per token that are hardly ever reached: inputs and outputs of every matrix, several times."""
    return sum(_SAFETY * p.element_size() * sum(p.shape[-2:]) for p in model.parameters() if p.ndim > 1)


def _eager_score_bytes(model: Any) -> float:
    """Bytes that a token adds to every other token of its row, where attention keeps its scores."""
    config = model.config.get_text_config()
    if attention_of(config) != "eager":
        return 0.0
    heads = config.num_hidden_layers * config.num_attention_heads
    return float(_SCORES * heads * next(model.parameters()).element_size())


def _saved_bytes(model: Any, length: int) -> int:
    """Bytes of tensors that a forward pass over one row of ``length`` tokens keeps, weights left out."""
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack_tensor(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        # An output that is kept as it is would hold the very node that keeps it: neither would ever be freed.
        return tensor.detach()

    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
        # What was kept must live until all is counted: memory that was freed comes again under the same address.
        ending = forward_to_head(model, torch.arange(length, device=ids.device), input_ids=ids, use_cache=False)
    total = sum(kept.values())
    del ending
    return total


def max_activation_bytes(model: nn.Module) -> int:
    """Bytes of activations that a pass may hold: those of the model's own parameters, at least `LEAST`."""
    return max(LEAST, sum(p.numel() * p.element_size() for p in model.parameters()))


def split_by_memory(model: Any, batch: AnswerBatch, most: int | None = None) -> Iterator[AnswerBatch]:
    """Cut a batch by rows so that the activations of each part stay below ``most`` bytes; a row is never cut.

    By default ``most`` is `max_activation_bytes`; a batch that is small enough comes back as it is.
    """
    rows, length = batch.ids.shape
    if most is None:
        most = max_activation_bytes(model)
    fitting = max(1, int(most / max(1.0, bytes_per_token(model, length) * length)))
    if fitting >= rows:
        yield batch
        return
    # As even as it goes: a rest of one row would be a pass of its own.
    number = -(-rows // fitting)
    for tensors in zip(
        *(t.tensor_split(number) for t in (batch.ids, batch.mask, batch.targets, batch.labels)), strict=True
    ):
        part = AnswerBatch(*tensors)
        if part.answer_tokens:
            yield part


def fits_in_memory(model: Any, rows: int, length: int) -> bool:
    """Whether the activations of a pass take at most half of the memory that is free where the model stands."""
    return rows * length * bytes_per_token(model, length) <= 0.5 * free_bytes(model.device)
