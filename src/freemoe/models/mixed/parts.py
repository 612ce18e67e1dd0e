"""What one expert has off of one weight, as a mixed forward pass uses it: whole rows and columns, and the places that are left.

A whole column is a zero in the input, a whole row a zero in the output: neither needs the weight. What is left is walked through
place by place, or written as zeros into a copy of the weight. Of a band on an accelerator only the rule is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from freemoe.kernels.sparse.bands import BandTile
from freemoe.kernels.sparse.rows import MOST_COLUMNS, SparsePlaces
from freemoe.models.mask import TensorMask
from freemoe.models.weights import WeightMatrix


@dataclass(frozen=True, eq=False)
class WeightMask:
    """What is off of one weight (N, K)."""

    rows: (
        Tensor | None
    )  # ``(n,)`` int64 on the weight's device: outputs that are off as a whole; None where there are none
    columns: Tensor | None  # The same of inputs
    singles: TensorMask | None  # All else, as a mask of the weight; None where there is nothing else
    places: SparsePlaces | None  # The same for the compiled loops instead, which hold less of a few
    shape: tuple[int, int]  # (N, K)
    tile: BandTile | None = None  # The rule of a band, in place of all of these

    @classmethod
    def of_tile(cls, tile: BandTile, weight: WeightMatrix) -> WeightMask:
        """Of a band whose mask is made while the weight is read."""
        return cls(None, None, None, None, (weight.num_rows, weight.num_columns), tile)

    @classmethod
    def from_mask(cls, mask: TensorMask, weight: WeightMatrix) -> WeightMask:
        """Of a mask of one dense weight."""
        shape = weight.num_rows, weight.num_columns
        rows, columns = _whole_lines(mask, shape)
        singles: TensorMask | None = mask
        if len(rows) or len(columns):
            off = mask.to_bools().cpu().view(shape)
            off[rows] = False
            off[:, columns] = False
            left = TensorMask.of_bools(off)
            singles = left if left.count else None
        rows, columns = rows.to(weight.device), columns.to(weight.device)
        places = None
        # One bit per weight is less than 16 per place from a sixteenth of them on.
        if singles is not None and weight.num_columns <= MOST_COLUMNS and singles.bits is None:
            places, singles = SparsePlaces.from_indices(singles.indices("cpu"), *shape), None
        singles = None if singles is None else singles.to(weight.device)
        return cls(rows if len(rows) else None, columns if len(columns) else None, singles, places, shape)

    @property
    def is_scattered(self) -> bool:
        """Whether places are off beside whole rows and columns."""
        return self.singles is not None or self.places is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors in memory; a tensor with two names counts once."""
        lines = sum(8 * len(t) for t in (self.rows, self.columns) if t is not None)
        # Two names for the same places count once.
        others = {
            id(held): held
            for held in (self.singles, self.places, self.__dict__.get("walked"), self.tile)
            if held is not None
        }
        return lines + sum(held.num_bytes for held in others.values())

    def scattered_off(self, device: torch.device) -> Tensor:
        """What is scattered, in canonical order: ``(n,)`` int64 flat places, or ``(N * K,)`` bool where it is much."""
        if self.places is not None:
            return self.places.flat_indices(self.shape[1], device)
        assert self.singles is not None
        return self.singles.indices(device) if self.singles.bits is None else self.singles.to_bools(device)

    @cached_property
    def walked(self) -> SparsePlaces | None:
        """What is scattered for the compiled loops; None where there is nothing or the matrix is too wide for them.

        Of a dense mask they are made when they are first needed.
        """
        if self.places is None and self.singles is not None and self.shape[1] <= MOST_COLUMNS:
            return SparsePlaces.from_indices(self.singles.indices("cpu"), *self.shape)
        return self.places


def _whole_lines(mask: TensorMask, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """``(n,)`` int64 each: the rows and the columns of a matrix (N, K) that are off as a whole."""
    if mask.count < min(shape):
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    if mask.bits is not None:
        off = mask.to_bools().cpu().view(shape)
        return off.all(1).nonzero().flatten(), off.all(0).nonzero().flatten()
    # Few places are counted sooner than a whole matrix is looked through.
    size, length = shape
    places = mask.indices("cpu")
    by_row, by_column = places // length, places % length
    return (
        (torch.bincount(by_row, minlength=size) == length).nonzero().flatten(),
        (torch.bincount(by_column, minlength=length) == size).nonzero().flatten(),
    )
