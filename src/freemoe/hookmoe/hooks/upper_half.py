"""The model cut in two at a layer: what enters the layer is computed once, and training runs from there up.

Nothing of a family's own forward is written again: the lower layers are made to pass on what they are given, so that
masks, rotary embeddings and layer types keep their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.evals.engine.output_head import forward_blocks
from freemoe.hookmoe.plans.layers import decoder_layers
from freemoe.models.hooks import combined_hooks, forward_pre_hook, replace_method
from freemoe.text.blocks import PackedBlocks
from freemoe.training.states import State


class _ReachedError(Exception):
    """The layer was reached; what is above need not run."""


@torch.no_grad()
def inputs_of(model: Any, blocks: PackedBlocks, layer: int, checkpoint: UnitState = NO_CHECKPOINT) -> Tensor:
    """What enters a decoder layer, for the model as it stands: (rows, length, h) in its own type, on the CPU.

    What is read is kept between two batches.
    """
    found: list[Tensor] = []

    def capture_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"]).cpu())
        raise _ReachedError

    def capture_batch(batch: PackedBlocks) -> State:
        with suppress(_ReachedError):
            forward_blocks(model, batch)
        return {"inputs": found.pop()}

    with forward_pre_hook(decoder_layers(model)[layer], capture_input, kwargs=True):
        return torch.cat([own["inputs"] for own in checkpoint.map_items(blocks.iter_batches(), capture_batch)])


@contextmanager
def start_at_layer(model: Any, layer: int) -> Iterator[None]:
    """While open, ``inputs_embeds`` enter the model at ``layer``; the layers below pass them on."""

    def pass_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    with combined_hooks(*(replace_method(module, pass_on) for module in decoder_layers(model)[:layer])):
        yield


@contextmanager
def checkpoint_layers(model: Any, first: int = 0) -> Iterator[None]:
    """While open, the layers from ``first`` on keep their inputs only, and make the rest again in the backward pass.

    It must still be open then, and whatever else changes the model too. The model's own way needs training mode, in which some
    routers add noise.
    """
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    with combined_hooks(
        *(replace_method(module, partial(again, module.forward)) for module in decoder_layers(model)[first:])
    ):
        yield
