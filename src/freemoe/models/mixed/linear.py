"""One linear whose rows act under different experts.

Ways of leaving out what is scattered over a weight: ``loops`` walks through the places (`kernels.sparse`), ``scratch`` writes zeros
into a copy of the weight that all linears share. Both leave the weight alone, as does the kernel that finds bands while it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from freemoe.kernels.sparse import bands
from freemoe.kernels.sparse import rows as sparse
from freemoe.models.mixed.cost import can_be_walked, row_limits
from freemoe.models.mixed.parts import Part
from freemoe.models.mixed.rows import Assignment
from freemoe.models.weights import Weight

Scratch = dict[tuple[torch.device, torch.dtype], Tensor]
"""One buffer per device and type, as long as the longest weight that used it."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a batch's experts have off of one weight.

    Attributes:
        weight: The weight.
        assignment: Of the batch.
        parts: Experts of the batch that have something off here.
        walked: Those of them of which something scattered is off, and their places for the loops; None where those cannot.
        tiled: Those whose mask is made from a band's rule, and their bands.
    """

    weight: Weight
    assignment: Assignment
    parts: dict[str, Part]
    walked: tuple[tuple[str, ...], sparse.Experts | None]
    tiled: tuple[tuple[str, ...], bands.BandTiles] | None = None

    @classmethod
    def of(cls, weight: Weight, assignment: Assignment, parts: dict[str, Part]) -> Plan:
        """Of a weight of which at least one expert has something off."""
        names = tuple(name for name, part in parts.items() if part.scattered)
        tiles = {name: part.tile for name, part in parts.items() if part.tile is not None}
        return cls(
            weight, assignment, parts,
            (names, _experts(weight, [parts[name] for name in names])),
            (tuple(tiles), bands.BandTiles.of(list(tiles.values()))) if tiles else None,
        )  # fmt: skip

    def can_walk(self, x: Tensor) -> bool:
        """Whether the loops can multiply this input here."""
        return self.walked[1] is not None and _plain(x, self.weight)


def _experts(weight: Weight, parts: list[Part]) -> sparse.Experts | None:
    if not parts or not can_be_walked(weight):
        return None
    places = [part.walked for part in parts]
    return sparse.Experts.of([p for p in places if p is not None])


def _plain(x: Tensor, weight: Weight) -> bool:
    own = weight.parameter
    return x.dtype == own.dtype and x.device == own.device and not torch.is_autocast_enabled(x.device.type)


def mixed(plan: Plan, x: Tensor, base: Callable[[Tensor], Tensor], loops: bool, scratch: Scratch) -> Tensor:
    """What the module gives, every row under its own expert.

    Args:
        plan: Of the batch.
        x: (..., K).
        base: The module's own forward.
        loops: Whether to walk through places rather than to copy the weight, where both are possible.
        scratch: Buffers.

    Returns:
        (..., N).

    Raises:
        DataError: The input does not fall into equal parts for the batch's sequences.
    """
    flat = x.reshape(-1, x.shape[-1])
    plan.assignment.each(len(flat))
    if not len(flat):
        return base(x)
    flat = _without_columns(plan, flat)
    names, experts = plan.walked
    bias: Tensor | None = getattr(plan.weight.module, "bias", None)
    if plan.tiled is not None and all(name in plan.tiled[0] for name in plan.assignment.of):
        y = flat.new_empty(len(flat), plan.weight.rows, dtype=plan.weight.parameter.dtype)
    elif not names:
        y = base(flat.view(x.shape)).reshape(len(flat), -1)
    elif loops and experts is not None and plan.can_walk(flat):
        y = sparse.products(flat, plan.weight.parameter.detach(), experts, *plan.assignment.lists(len(flat), names))
        y = y if bias is None else y.add_(bias)
    else:
        y = _by_copies(plan, flat, base, bias, scratch)
    y = _with_bands(plan, flat, y, bias)
    return _without_rows(plan, y, bias).view(*x.shape[:-1], -1)


def _without_columns(plan: Plan, flat: Tensor) -> Tensor:
    """The input with zeros where an expert has columns off."""
    cut = {name: part.columns for name, part in plan.parts.items() if part.columns is not None}
    if not cut:
        return flat
    flat = flat.clone()
    for name, columns in cut.items():
        own = plan.assignment.rows(len(flat), (name,), flat.device)
        flat[own[:, None], columns.to(flat.device)] = 0
    return flat


def _without_rows(plan: Plan, y: Tensor, bias: Tensor | None) -> Tensor:
    """The output with the bias alone where an expert has rows off."""
    for name, part in plan.parts.items():
        if part.rows is not None:
            own, off = plan.assignment.rows(len(y), (name,), y.device), part.rows.to(y.device)
            y[own[:, None], off] = 0 if bias is None else bias[off].to(y.dtype)
    return y


def _with_bands(plan: Plan, flat: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    """The output with the rows of band experts as they should be."""
    if plan.tiled is None:
        return y
    names, tiles = plan.tiled
    tokens, starts = plan.assignment.lists(len(flat), names)
    own = plan.weight.parameter.detach()
    few = len(tokens) <= row_limits(own.device).tiled * len(names)
    multiply = bands.products if few and _plain(flat, plan.weight) else bands.reference
    part = multiply(flat.to(own.device), own, tiles, tokens, starts)
    part = part if bias is None else part.add_(bias)
    y[plan.assignment.rows(len(flat), names, y.device)] = part.to(y)
    return y


def _by_copies(
    plan: Plan, flat: Tensor, base: Callable[[Tensor], Tensor], bias: Tensor | None, scratch: Scratch
) -> Tensor:
    """One product per expert, with a copy of the weight that has zeros; the copy is put right again between two of them."""
    weight, names = plan.weight, plan.walked[0]
    own = weight.parameter.detach()
    buffer = _buffer(scratch, own)
    copy = buffer[: own.numel()].view(own.shape)
    copy.copy_(own)
    matrix, given = weight.arrange(copy)[0], flat.to(own.device)
    others = tuple(name for name in plan.assignment.of if name not in names)
    y: Tensor | None = None
    if others:
        rest = plan.assignment.rows(len(flat), others, own.device).sort().values
        part = base(given[rest])
        y = part.new_empty(len(flat), part.shape[-1])
        y[rest] = part
    for name in names:
        off = plan.parts[name].off(own.device)
        if much := off.dtype == torch.bool:
            matrix.masked_fill_(off.view(matrix.shape), 0)
        else:
            off = _in_memory(weight, off)
            copy.view(-1).index_fill_(0, off, 0)
        rows = plan.assignment.rows(len(flat), (name,), own.device)
        part = functional.linear(given[rows], matrix, bias)
        y = part.new_empty(len(flat), part.shape[-1]) if y is None else y
        y[rows] = part
        if much:
            copy.copy_(own)
        else:
            copy.view(-1).index_copy_(0, off, own.reshape(-1)[off])
    assert y is not None
    return y.to(flat.device)


def _buffer(scratch: Scratch, own: Tensor) -> Tensor:
    key: Any = (own.device, own.dtype)
    if key not in scratch or len(scratch[key]) < own.numel():
        scratch[key] = torch.empty(own.numel(), dtype=own.dtype, device=own.device)
    return scratch[key]


def _in_memory(weight: Weight, indices: Tensor) -> Tensor:
    """Flat places (rows, columns) as places of a parameter of the same shape whose numbers lie side by side."""
    if weight.layout == "rows":
        return indices
    return indices % weight.columns * weight.rows + torch.div(indices, weight.columns, rounding_mode="floor")
