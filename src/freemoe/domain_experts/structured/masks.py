"""Masks over units on a running model: one number per unit that multiplies what the unit gives.

With numbers that ask for gradients, a backward pass gives dL/dm for every unit, those that are off included, and needs
no weight's gradient. With zeros and ones the model computes what it would with the units' weights at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.domain_experts.structured.units import LayerUnits, ModelUnits, UnitsOff
from freemoe.models.gates import restrict_router
from freemoe.models.hooks import forward_hook, forward_pre_hook

Masks = Mapping[int, Tensor]
"""Number of a decoder layer to (count,) floats, one per unit."""


def all_on_masks(units: ModelUnits, device: Any) -> dict[int, Tensor]:
    """Masks that leave everything on."""
    return {layer.number: torch.ones(layer.count, device=device) for layer in units.layers}


def masks_of(units: ModelUnits, off: UnitsOff, device: Any) -> dict[int, Tensor]:
    """Zeros at the units that are off, ones elsewhere."""
    found = all_on_masks(units, device)
    for number, numbers in off.items():
        found[number][numbers.to(device)] = 0
    return found


@contextmanager
def apply_masks(units: ModelUnits, masks: Masks) -> Iterator[None]:
    """Inside, every unit's contribution is multiplied by its number in ``masks``; it nests.

    An expert whose number is 0 is also taken out of the router's choice, so that the next best one is asked instead, as
    in the model that is cut.
    """
    with ExitStack() as stack:
        for layer in units.layers:
            if layer.number in masks:
                stack.enter_context(_HOOKS[units.kind](layer, masks[layer.number]))
        yield


@contextmanager
def units_off(units: ModelUnits, off: UnitsOff) -> Iterator[None]:
    """Inside, these units are off; the weights are not touched."""
    units.require_valid(off)
    device = units.layers[0].parts[0].weight.device
    layers = {k: v for k, v in masks_of(units, off, device).items() if k in off}
    with torch.no_grad():
        context = apply_masks(units, layers)
    with context:
        yield


def _mask_input(layer: LayerUnits, mask: Tensor) -> AbstractContextManager[None]:
    def scale_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        # A unit's number at each of its inputs.
        factors = mask.repeat_interleave(x.shape[-1] // layer.count)
        return (x * factors.to(x.dtype), *inputs[1:])

    return forward_pre_hook(layer.module, scale_input)


def _mask_residual(layer: LayerUnits, mask: Tensor) -> AbstractContextManager[None]:
    off = not mask.requires_grad and float(mask) == 0

    def scale_residual(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        y = output[0] if isinstance(output, tuple) else output
        mixed = x if off else x + mask.to(y.dtype) * (y - x)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    return forward_hook(layer.module, scale_residual, kwargs=True)


_HOOKS: dict[str, Callable[[LayerUnits, Tensor], AbstractContextManager[None]]] = {
    "neuron": _mask_input,
    "kv_group": _mask_input,
    "layer": _mask_residual,
    "expert": lambda layer, mask: restrict_router(layer.module, mask),
}
