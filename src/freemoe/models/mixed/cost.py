"""Which way of running several experts is likely the quickest for how many rows: a rule, the same on every machine of a kind.

A walk through the places costs what is off for every few rows. Masked copies cost the whole weight once, and then nothing; one
call per expert reads it as often as there are experts. A rule and not a stopwatch: the ways differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from freemoe.kernels.sparse import rows as sparse
from freemoe.models.weights import WeightMatrix


class RowLimits(NamedTuple):
    """For how many rows of an input each way is the one to take."""

    walked: int  # Up to so many rows places are walked through, where there are compiled loops for it
    copied: int  # From so many rows on masked copies are quicker than one call per expert
    # Up to so many rows of each expert a band's mask is made while the weight is read, where a kernel can: it reads
    # the whole weight for every 16 rows (2 bytes a number), a masked copy once (about 36, with the scores that the
    # mask needs)
    tiled: int


# The CPU's were measured; an accelerator's are counted in bytes, and no accelerator has timed them yet. Its walk fetches a sector
# of 32 bytes for every place and row, so that copies overtake it sooner.
_ROW_LIMITS = {"cpu": RowLimits(256, 512, 256), "accelerator": RowLimits(64, 512, 256)}


def row_limits(device: torch.device) -> RowLimits:
    """The limits of a kind of device."""
    return _ROW_LIMITS["cpu" if device.type == "cpu" else "accelerator"]


def can_be_walked(weight: WeightMatrix) -> bool:
    """Whether compiled loops can read a weight where it is: one that lies row by row."""
    own = weight.parameter
    plain = weight.layout == "rows" and own.is_contiguous() and weight.stored is None
    return plain and weight.num_columns <= sparse.MOST_COLUMNS and sparse.loops_available(own.dtype, own.device.type)


def worth_mixing(weights: Sequence[WeightMatrix], rows: int) -> bool:
    """Whether one forward pass for all experts is quicker than one for each, by most of the numbers of a base."""
    limits = row_limits(weights[0].device)
    if rows > limits.walked:
        return rows >= limits.copied
    return 2 * sum(w.size for w in weights if can_be_walked(w)) >= sum(w.size for w in weights)
