"""One linear whose rows act under different experts.

Ways of leaving out what is scattered over a weight: ``loops`` walks through the places (`kernels.sparse`), ``scratch`` writes zeros
into a copy of the weight that all linears share. Both leave the weight alone, as does the kernel that finds bands while it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from freemoe.kernels.sparse import bands
from freemoe.kernels.sparse import rows as sparse
from freemoe.models.mixed.cost import can_be_walked, row_limits
from freemoe.models.mixed.parts import WeightMask
from freemoe.models.mixed.rows import ExpertAssignment
from freemoe.models.weights import WeightMatrix

Scratch = dict[tuple[torch.device, torch.dtype], Tensor]
"""One buffer per device and type, as long as the longest weight that used it."""


@dataclass(frozen=True, eq=False)
class BatchMask:
    """What a batch's experts have off of one weight."""

    weight: WeightMatrix  # The weight
    assignment: ExpertAssignment  # Of the batch
    parts: dict[str, WeightMask]  # Experts of the batch that have something off here
    # Those of them of which something scattered is off, and their places for the loops; None where those cannot
    walked: tuple[tuple[str, ...], sparse.SparseExperts | None]
    # Those whose mask is made from a band's rule, and their bands
    tiled: tuple[tuple[str, ...], bands.BandTiles] | None = None

    @classmethod
    def from_weight_masks(
        cls, weight: WeightMatrix, assignment: ExpertAssignment, parts: dict[str, WeightMask]
    ) -> BatchMask:
        """Of a weight of which at least one expert has something off."""
        names = tuple(name for name, part in parts.items() if part.is_scattered)
        tiles = {name: part.tile for name, part in parts.items() if part.tile is not None}
        places = [parts[name].walked for name in names] if can_be_walked(weight) else []
        walked = sparse.SparseExperts.from_places([p for p in places if p is not None]) if places else None
        tiled = (tuple(tiles), bands.BandTiles.from_tiles(list(tiles.values()))) if tiles else None
        return cls(weight, assignment, parts, (names, walked), tiled)


def _same_format(x: Tensor, weight: WeightMatrix) -> bool:
    own = weight.parameter
    return x.dtype == own.dtype and x.device == own.device and not torch.is_autocast_enabled(x.device.type)


def mixed_linear(plan: BatchMask, x: Tensor, base: Callable[[Tensor], Tensor], loops: bool, scratch: Scratch) -> Tensor:
    """What the module gives, every row under its own expert.

    Args:
        plan: Of the batch.
        x: (..., K).
        base: The module's own forward.
        loops: Whether to walk through places rather than to copy the weight, where both are possible.
        scratch: Buffers.

    Raises:
        DataError: The input does not fall into equal parts for the batch's sequences.
    """
    flat = x.reshape(-1, x.shape[-1])
    plan.assignment.rows_per_sequence(len(flat))
    if not len(flat):
        return base(x)
    if any(part.columns is not None for part in plan.parts.values()):
        flat = flat.clone()
    for name, part in plan.parts.items():
        # Zeros where an expert has columns off.
        if part.columns is not None:
            own = plan.assignment.rows_of_experts(len(flat), (name,), flat.device)
            flat[own[:, None], part.columns.to(flat.device)] = 0
    names, experts = plan.walked
    bias: Tensor | None = getattr(plan.weight.module, "bias", None)
    if plan.tiled is not None and all(name in plan.tiled[0] for name in plan.assignment.by_expert):
        y = flat.new_empty(len(flat), plan.weight.num_rows, dtype=plan.weight.parameter.dtype)
    elif not names:
        y = base(flat.view(x.shape)).reshape(len(flat), -1)
    elif loops and experts is not None and _same_format(flat, plan.weight):
        y = sparse.sparse_products(
            flat, plan.weight.parameter.detach(), experts, *plan.assignment.rows_and_starts(len(flat), names)
        )
        y = y if bias is None else y.add_(bias)
    else:
        y = _by_copies(plan, flat, base, bias, scratch)
    y = _with_bands(plan, flat, y, bias)
    for name, part in plan.parts.items():
        # The bias alone where an expert has rows off.
        if part.rows is not None:
            own, off = plan.assignment.rows_of_experts(len(y), (name,), y.device), part.rows.to(y.device)
            y[own[:, None], off] = 0 if bias is None else bias[off].to(y.dtype)
    return y.view(*x.shape[:-1], -1)


def _with_bands(plan: BatchMask, flat: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    """The output with the rows of band experts as they should be."""
    if plan.tiled is None:
        return y
    names, tiles = plan.tiled
    tokens, starts = plan.assignment.rows_and_starts(len(flat), names)
    own = plan.weight.parameter.detach()
    few = len(tokens) <= row_limits(own.device).tiled * len(names)
    multiply = bands.tiled_products if few and _same_format(flat, plan.weight) else bands.reference_tiled_products
    part = multiply(flat.to(own.device), own, tiles, tokens, starts)
    part = part if bias is None else part.add_(bias)
    y[plan.assignment.rows_of_experts(len(flat), names, y.device)] = part.to(y)
    return y


def _by_copies(
    plan: BatchMask, flat: Tensor, base: Callable[[Tensor], Tensor], bias: Tensor | None, scratch: Scratch
) -> Tensor:
    """One product per expert, with a copy of the weight that has zeros; the copy is put right again between two of them."""
    weight, names = plan.weight, plan.walked[0]
    own = weight.parameter.detach()
    key = (own.device, own.dtype)
    if key not in scratch or len(scratch[key]) < own.numel():
        scratch[key] = torch.empty(own.numel(), dtype=own.dtype, device=own.device)
    copy = scratch[key][: own.numel()].view(own.shape)
    copy.copy_(own)
    matrix, given = weight.to_canonical(copy)[0], flat.to(own.device)
    others = tuple(name for name in plan.assignment.by_expert if name not in names)
    y: Tensor | None = None
    if others:
        rest = plan.assignment.rows_of_experts(len(flat), others, own.device).sort().values
        part = base(given[rest])
        y = part.new_empty(len(flat), part.shape[-1])
        y[rest] = part
    for name in names:
        off = plan.parts[name].scattered_off(own.device)
        if much := off.dtype == torch.bool:
            matrix.masked_fill_(off.view(matrix.shape), 0)
        else:
            if weight.layout != "rows":
                # Flat places (rows, columns) as places of a parameter of the same shape whose numbers lie side by side.
                row = torch.div(off, weight.num_columns, rounding_mode="floor")
                off = off % weight.num_columns * weight.num_rows + row
            copy.view(-1).index_fill_(0, off, 0)
        rows = plan.assignment.rows_of_experts(len(flat), (name,), own.device)
        part = functional.linear(given[rows], matrix, bias)
        y = part.new_empty(len(flat), part.shape[-1]) if y is None else y
        y[rows] = part
        if much:
            copy.copy_(own)
        else:
            copy.view(-1).index_copy_(0, off, own.reshape(-1)[off])
    assert y is not None
    return y.to(flat.device)
