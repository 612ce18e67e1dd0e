"""What every unit is worth to a loss, from one pass: the gain of switching it off, and how much that disturbs.

To first order, switching unit j off changes the loss by -a_j, a_j = dL/dm_j being the gradient of the mean loss by the
number that multiplies the unit. The linear estimate says nothing about units that carry massive activations: a_j is
small against what their removal does. The second-order term is d_j / 2 with the curvature d_j = E[x_j^2] E[h_j^2], x_j
what the unit gives and h_j the loss's gradient by it, both per token: the two means are smooth, where the mean of
(x_j h_j)^2 is as noisy as a_j itself (docs/structured.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.errors import NumericError
from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.domain_experts.purify.activations import split_by_memory
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_loss, finite_values
from freemoe.domain_experts.purify.gradients import Checkpointing, gradients_to
from freemoe.domain_experts.structured.masks import all_on_masks, apply_masks
from freemoe.domain_experts.structured.units import LayerUnits, ModelUnits
from freemoe.models.hooks import forward_pre_hook, on_gradient
from freemoe.training.states import State, pack_state, unpack_state


@dataclass(frozen=True, eq=False)
class UnitImportance:
    """The units of one layer, float32; gain and curvature (count,), in nats per answer token."""

    gain: Tensor  # a_j: by how much the loss falls, to first order, when the unit goes off
    curvature: Tensor  # d_j >= 0: twice the second-order rise
    energy: Tensor  # (count, width) mean squares, over tokens, of what the unit gives to the linear that reads it


def unit_orders(worths: Sequence[UnitImportance]) -> dict[str, list[Tensor]]:
    """Ways to order units, the first to go off lowest: the stopping loss says which one a model wants.

    * ``change``: the predicted change of the loss, d / 2 - a. Right where the prediction is: small models.
    * ``ratio``: the gain per disturbance, a / d, largest first.
    * ``zone``: the sign inside a zone of small disturbance: units with a > 0 by ascending d, then the others.
    * ``quiet``: by ascending d alone.
    """
    middle = torch.cat([w.curvature for w in worths]).median().clamp(min=1e-30)
    largest = max(float(w.curvature.max()) for w in worths) + 1
    return {
        "change": [w.curvature / 2 - w.gain for w in worths],
        # A floor of some of the usual disturbance: none is as small as a short pass may say.
        "ratio": [-w.gain / (w.curvature + middle / 10) for w in worths],
        "zone": [w.curvature + largest * (w.gain <= 0) for w in worths],
        "quiet": [w.curvature for w in worths],
    }


def measure_importance(
    model: Any,
    units: ModelUnits,
    batches: Sequence[AnswerBatch],
    checkpoint: UnitState = NO_CHECKPOINT,
    checkpointing: Checkpointing = False,
) -> list[UnitImportance]:
    """Measure every unit on documents, in one pass; layers in the order of ``units``.

    For layers and experts, whose contribution is no input of one linear, the curvature is the mean over batches of the
    squared gradient and the energy is not measured (width 0). The pass keeps its sums in ``checkpoint`` between two batches, and
    less of its activations with ``checkpointing``, as for ``gradients_to``.

    Raises:
        NumericError: When a loss or gradient is NaN or infinite.
    """
    device = units.layers[0].parts[0].weight.device
    masks = {n: m.requires_grad_() for n, m in all_on_masks(units, device).items()}
    tokens = sum(b.answer_tokens for b in batches)
    moments: dict[int, list[Tensor]] = {}
    sums = {layer.number: torch.zeros(2, layer.count, device=device) for layer in units.layers}
    positions = 0

    def to_state() -> State:
        return {
            **pack_state("sums", {str(n): t for n, t in sums.items()}),
            **pack_state("moments", {f"{n}|{i}": t for n, pair in moments.items() for i, t in enumerate(pair)}),
            "positions": torch.tensor(positions),
        }

    def load_state(state: State) -> None:
        nonlocal positions
        positions = int(state["positions"])
        for name, found in unpack_state("sums", state).items():
            sums[int(name)].copy_(found)
        own = unpack_state("moments", state)
        for number in {int(name.partition("|")[0]) for name in own}:
            moments[number] = [own[f"{number}|{i}"].to(device) for i in (0, 1)]

    with gradients_to(model, [], lambda *_: None, checkpointing=checkpointing), ExitStack() as stack:
        stack.enter_context(apply_masks(units, masks))
        if units.kind in ("neuron", "kv_group"):
            for layer in units.layers:
                stack.enter_context(_collect_moments(layer, moments))
        cut = [part for whole in batches for part in split_by_memory(model, whole)]
        for batch in checkpoint.resume_iter(cut, to_state, load_state):
            positions += int(batch.mask.sum())
            loss = answer_loss(model, batch)
            loss.backward()
            finite_values([loss.detach()])
            for number, mask in masks.items():
                if mask.grad is None:
                    continue
                sums[number][0] += mask.grad
                sums[number][1] += mask.grad**2
                mask.grad = None
    return [
        _of_layer(layer, sums[layer.number], moments.get(layer.number), positions, tokens) for layer in units.layers
    ]


def _of_layer(
    layer: LayerUnits, sums: Tensor, moments: list[Tensor] | None, positions: int, tokens: int
) -> UnitImportance:
    """What was summed, per token: ``sums`` are gradients and their squares, ``(2, count)``."""
    if not bool(torch.isfinite(sums).all()):
        raise NumericError(
            f"The gradient of the units of layer {layer.number} is NaN or infinite. Try --dtype float32."
        )
    slope, square = sums
    if moments is None:
        return UnitImportance(slope / tokens, square / tokens, sums.new_zeros(layer.count, 0))
    inputs, gradients = (m.unflatten(0, (layer.count, -1)) for m in moments)
    energy = inputs / positions
    return UnitImportance(slope / tokens, (energy * gradients).sum(1) / tokens, energy)


def _collect_moments(layer: LayerUnits, moments: dict[int, list[Tensor]]) -> AbstractContextManager[None]:
    """Sum the squares of a linear's inputs, and of the loss's gradients by them: two of (count * width,)."""

    def input_hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # A hook that held the input itself would keep it alive, and with it all activations behind it.
        squares = _sum_squares(inputs[0].detach())

        def add_gradient(gradient: Tensor) -> None:
            found = [squares, _sum_squares(gradient)]
            old = moments.get(layer.number)
            moments[layer.number] = found if old is None else [a + b for a, b in zip(old, found, strict=True)]

        on_gradient(inputs[0], add_gradient)

    return forward_pre_hook(layer.module, input_hook)


def _sum_squares(rows: Tensor) -> Tensor:
    return rows.float().square().flatten(0, -2).sum(0)
