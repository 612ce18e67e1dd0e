"""Masks for tests, from plain indices and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from freemoe.models.mask import Mask
from freemoe.models.weights import WeightMatrix


def mask_of(indices: Mapping[str, Tensor], weights: Sequence[WeightMatrix]) -> Mask:
    """The mask of flat indices by weight."""
    return Mask.of_indices(indices, weights)


def indices_of(mask: Mask) -> dict[str, Tensor]:
    """A mask's flat indices by weight."""
    return {name: off.indices() for name, off in mask.items()}
