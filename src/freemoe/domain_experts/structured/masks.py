"""Masks over units on a running model: one number per unit that multiplies what the unit gives.

With numbers that ask for gradients, a backward pass gives dL/dm for every unit, those that are off included, and needs
no weight's gradient. With zeros and ones the model computes what it would with the units' weights at zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.domain_experts.structured.units import LayerUnits, Units, UnitsOff
from freemoe.models.gates import narrowed
from freemoe.models.hooks import after, before

Masks = Mapping[int, Tensor]
"""Number of a decoder layer to (count,) floats, one per unit."""


def ones(units: Units, device: Any) -> dict[int, Tensor]:
    """Masks that leave everything on."""
    return {layer.number: torch.ones(layer.count, device=device) for layer in units.layers}


def masks_of(units: Units, off: UnitsOff, device: Any) -> dict[int, Tensor]:
    """Zeros at the units that are off, ones elsewhere."""
    found = ones(units, device)
    for number, numbers in off.items():
        found[number][numbers.to(device)] = 0
    return found


@contextmanager
def masked(units: Units, masks: Masks) -> Iterator[None]:
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
def units_off(units: Units, off: UnitsOff) -> Iterator[None]:
    """Inside, these units are off; the weights are not touched."""
    units.check(off)
    device = units.layers[0].parts[0].weight.device
    layers = {k: v for k, v in masks_of(units, off, device).items() if k in off}
    with torch.no_grad():
        context = masked(units, layers)
    with context:
        yield


def spread(mask: Tensor, width: int) -> Tensor:
    """(count,) -> (count * width,): a unit's number at each of its inputs."""
    return mask if width == 1 else mask.repeat_interleave(width)


def _input(layer: LayerUnits, mask: Tensor) -> AbstractContextManager[None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        return (x * spread(mask, x.shape[-1] // layer.count).to(x.dtype), *inputs[1:])

    return before(layer.module, hook)


def _residual(layer: LayerUnits, mask: Tensor) -> AbstractContextManager[None]:
    off = not mask.requires_grad and float(mask) == 0

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        y = output[0] if isinstance(output, tuple) else output
        mixed = x if off else x + mask.to(y.dtype) * (y - x)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    return after(layer.module, hook, kwargs=True)


def _routed(layer: LayerUnits, mask: Tensor) -> AbstractContextManager[None]:
    return narrowed(layer.module, mask)


_HOOKS = {"neuron": _input, "kv_group": _input, "layer": _residual, "expert": _routed}
