"""Masks for tests, from plain indices and back."""

from freemoe.models.mask import Mask


def mask_of(indices, weights):
    """The mask of flat indices by weight."""
    return Mask.of_indices(indices, weights)


def indices_of(mask):
    """A mask's flat indices by weight."""
    return {name: off.indices() for name, off in mask.items()}
