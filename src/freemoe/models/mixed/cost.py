"""Which way of running several experts is likely the quickest for how many rows: a rule, the same on every machine.

A walk through the places costs what is off for every few rows. Masked copies cost the whole weight once, and then nothing; one
call per expert reads it as often as there are experts. A rule and not a stopwatch: the ways differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from freemoe.models.mixed.linear import can_be_walked
from freemoe.models.weights import Weight

MAX_WALKED_ROWS = 256
"""Up to so many rows places are walked through, where there are compiled loops for it."""

MIN_COPIED_ROWS = 512
"""From so many rows on masked copies are quicker than one call per expert."""


def worth_mixing(weights: Sequence[Weight], rows: int) -> bool:
    """Whether one forward pass for all experts is quicker than one for each, by most of the numbers of a base.

    Args:
        weights: From ``find_weights``.
        rows: That a linear is given.
    """
    if rows > MAX_WALKED_ROWS:
        return rows >= MIN_COPIED_ROWS
    return 2 * sum(w.size for w in weights if can_be_walked(w)) >= sum(w.size for w in weights)
