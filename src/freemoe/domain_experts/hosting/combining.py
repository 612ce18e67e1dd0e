"""Experts of experts: what is off in any of them (union, ``a+b``), or in all of them (intersection, ``a&b``)."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from freemoe.core.errors import DataError, RecipeError
from freemoe.core.registry import unknown_name
from freemoe.domain_experts.expert import Expert, Lines, switch_expert, unit_expert
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.weights import Weight

Operation = Literal["union", "intersection"]

SIGNS: dict[str, Operation] = {"+": "union", "&": "intersection"}
"""How a combination is written where a name is expected."""


def label(operation: str, names: Sequence[str]) -> str:
    """How a combination is written: ``a+b``, ``a&b``.

    Raises:
        RecipeError: For an operation that there is not.
    """
    for sign, known in SIGNS.items():
        if known == operation:
            return sign.join(names)
    raise RecipeError(f"Experts are combined by {' or '.join(SIGNS.values())}, not by {operation!r}.")


def parse(name: str, known: Collection[str]) -> tuple[Operation, list[str]] | None:
    """The operation and the experts that a name such as ``a+b`` stands for; None where it has neither sign.

    Args:
        name: What was asked for; no name of an expert by itself.
        known: Names of the experts.

    Raises:
        UnknownNameError: One of the parts is no expert.
    """
    unknown = None
    for sign, operation in SIGNS.items():
        parts = [part.strip() for part in name.split(sign)]
        wrong = [part for part in parts if part not in known]
        if not wrong:
            return operation, parts
        if len(wrong) < len(parts):
            unknown = wrong[0]
    if unknown is None:
        return None
    raise unknown_name(
        "expert", unknown, list(known), f"It stands in {name!r}; a+b is a union and a&b an intersection of experts."
    )


def combined_mask(operation: Operation, masks: Sequence[Mask]) -> Mask:
    """What is off in any of several masks, or in all of them."""
    if operation == "union":
        return masks[0].union(*masks[1:])
    return functools.reduce(lambda a, b: a.difference(a.difference(b)), masks)


def combine(name: str, operation: Operation, experts: Sequence[Expert], weights: Sequence[Weight]) -> Expert:
    """An expert of its own, made of others of the same base, which must be switched in now.

    Whole units that are off stay units; all else becomes single switches.

    Args:
        name: Of the new expert.
        operation: ``union`` or ``intersection``.
        experts: At least two.
        weights: From ``find_weights``.

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
    return unit_expert(name, _unit(experts), lines, mask.difference(whole))


def _unit(experts: Sequence[Expert]) -> str:
    """The kind of unit that a combination has; whole experts of a mixture matter most, as routers must leave them out."""
    kinds = list(dict.fromkeys(e.unit for e in experts if e.unit))
    return "expert" if "expert" in kinds else kinds[0]


def _whole_lines(experts: Sequence[Expert], mask: Mask, weights: Sequence[Weight]) -> Lines:
    """Rows, columns and experts of the experts' units all of which is off in a mask."""
    if not any(e.unit for e in experts):
        return {}
    unit, shapes = _unit(experts), {w.name: w.shape for w in weights}
    asked: dict[str, tuple[str, list[Tensor]]] = {}
    for expert in experts:
        for name, (axis, numbers) in expert.lines.items() if expert.unit == unit else ():
            asked.setdefault(name, (axis, []))[1].append(numbers)
    found: Lines = {}
    for name, (axis, several) in asked.items():
        if name not in mask:
            continue
        count, rows, columns = shapes[name]
        off = mask[name].bools().cpu().view(count * rows, columns)
        whole = off.all(0) if axis == "columns" else off.view(count if axis == "experts" else count * rows, -1).all(1)
        numbers = torch.unique(torch.cat(several))
        if len(kept := numbers[whole[numbers]]):
            found[name] = axis, kept
    return found
