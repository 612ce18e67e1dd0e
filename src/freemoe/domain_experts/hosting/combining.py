"""Experts of experts: what is off in any of them (union, ``a+b``), or in all of them (intersection, ``a&b``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from freemoe.core.errors import DataError
from freemoe.domain_experts.expert import DomainExpert, Lines, switch_expert, unit_expert
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.weights import WeightMatrix
from freemoe.recipes.expert_names import Operation


def combined_mask(operation: Operation | None, masks: Sequence[Mask]) -> Mask:
    """What is off in any of several masks, or in all of them; of one the mask itself."""
    if operation == "union":
        return masks[0].union(*masks[1:])
    return functools.reduce(lambda a, b: a.difference(a.difference(b)), masks)


def combine_experts(
    name: str, operation: Operation, experts: Sequence[DomainExpert], weights: Sequence[WeightMatrix]
) -> DomainExpert:
    """An expert of its own, made of others of the same base, which must be switched in now.

    Whole units that are off stay units; all else becomes single switches.

    Raises:
        DataError: There are fewer than two, or nothing is off in what they have in common.
    """
    if len(experts) < 2:
        raise DataError(f"{name!r} is made of {len(experts)} experts; a {operation} needs at least 2.")
    mask = combined_mask(operation, [e.mask(weights) for e in experts])
    if not mask.count:
        parts = ", ".join(repr(e.name) for e in experts)
        why = "no weight is off in all of them" if operation == "intersection" else "nothing is off in any of them"
        raise DataError(f"The {operation} of {parts} is the base itself: {why}.")
    lines = _whole_lines(experts, mask, weights)
    if not lines:
        return switch_expert(name, mask)
    sizes = {w.name: w.shape for w in weights}
    whole = Mask({k: TensorMask.of_lines(sizes[k], axis, numbers) for k, (axis, numbers) in lines.items()})
    return unit_expert(name, _combined_unit(experts), lines, mask.difference(whole))


def _combined_unit(experts: Sequence[DomainExpert]) -> str:
    """The kind of unit that a combination has; whole experts of a mixture matter most, as routers must leave them out."""
    kinds = list(dict.fromkeys(e.unit for e in experts if e.unit))
    return "expert" if "expert" in kinds else kinds[0]


def _whole_lines(experts: Sequence[DomainExpert], mask: Mask, weights: Sequence[WeightMatrix]) -> Lines:
    """Rows, columns and experts of the experts' units all of which is off in a mask."""
    if not any(e.unit for e in experts):
        return {}
    unit, shapes = _combined_unit(experts), {w.name: w.shape for w in weights}
    asked: dict[str, tuple[str, list[Tensor]]] = {}
    for expert in experts:
        for name, (axis, numbers) in expert.lines.items() if expert.unit == unit else ():
            asked.setdefault(name, (axis, []))[1].append(numbers)
    found: Lines = {}
    for name, (axis, several) in asked.items():
        if name not in mask:
            continue
        count, rows, columns = shapes[name]
        off = mask[name].to_bools().cpu().view(count * rows, columns)
        whole = off.all(0) if axis == "columns" else off.view(count if axis == "experts" else count * rows, -1).all(1)
        numbers = torch.unique(torch.cat(several))
        if len(kept := numbers[whole[numbers]]):
            found[name] = axis, kept
    return found
