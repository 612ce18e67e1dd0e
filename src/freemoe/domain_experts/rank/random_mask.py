"""Random masks that match another one: the control of every claim that it matters which weights are off."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from freemoe.core.threads import on_threads
from freemoe.models.mask import Mask, TensorMask

# Of magnitudes, within which weights stand for each other.
_BINS = 256
# Numbers that a thread draws at a time; even.
_PART = 1 << 22


def random_mask(mask: Mask, seed: int, values: Callable[[str], Tensor] | None = None) -> Mask:
    """The control: as many numbers per weight as a mask has, drawn at random.

    With ``values`` they are as large, too: the magnitudes that are off are cut into bins of equal counts, and from every
    bin as many numbers of the weight are drawn as are off in it. What is off may be drawn again; a mask of all that is as
    small as it is its own control. The same seed draws the same on every device; ``values`` gives a weight's numbers by its
    name, in canonical order.
    """
    drawn = {}
    for i, (name, off) in enumerate(mask.items()):
        uniform = _uniform_numbers([seed, i], off.size)
        if values is None:
            bins, count = torch.zeros(off.size, dtype=torch.int32, device=uniform.device), 1
        else:
            bins, count = _bins_of_magnitude(off, values(name).reshape(-1)), _BINS
        drawn[name] = TensorMask.of_indices(
            _draw_per_bin(off.gather_values(bins), bins, count, uniform.to(bins.device)), off.size
        )
    return Mask(drawn)


def _uniform_numbers(seed: list[int], size: int) -> Tensor:
    """Numbers from 0 to 1, ``(size,)`` fp32: those of numpy's generator, each thread at its own place in them."""
    drawn = np.empty(size, dtype=np.float32)

    def fill_part(first: int) -> None:
        rng = np.random.default_rng(seed)
        # A step of the generator makes two of these numbers.
        rng.bit_generator.advance(first // 2)  # pyright: ignore[reportAttributeAccessIssue]
        rng.random(out=drawn[first : first + _PART], dtype=np.float32)

    on_threads(fill_part, range(0, size, _PART))
    return torch.from_numpy(drawn)


def _bins_of_magnitude(off: TensorMask, flat: Tensor) -> Tensor:
    """Number of every magnitude's bin between quantiles of those that are off; `_BINS` for what is smaller or larger than all."""
    size = flat.abs()
    edges = off.gather_values(size).sort().values
    edges = edges[torch.linspace(0, len(edges) - 1, _BINS + 1, dtype=torch.float64).round().long()]
    bins = torch.bucketize(size, edges[1:-1].contiguous(), right=True, out_int32=True)
    return bins.masked_fill_((size < edges[0]) | (size > edges[-1]), _BINS)


def _draw_per_bin(wanted: Tensor, bins: Tensor, count: int, uniform: Tensor) -> Tensor:
    """Places drawn without replacement, in every bin as many as are wanted: ``(wanted,)`` int64, ascending."""
    needed, there = (torch.bincount(b, minlength=count)[:count].double() for b in (wanted, bins))
    # Those with the smallest numbers of a bin are drawn. All but a few more than are needed fall out before anything is sorted.
    bound = torch.cat([(needed + 8 * needed.sqrt() + 32) / there, needed.new_zeros(1)])
    near = (uniform < bound[bins]).nonzero().flatten()
    bins, order = (bins[near] + uniform[near].double()).sort()
    bins = bins.long()
    first = torch.searchsorted(bins, torch.arange(count, device=bins.device))
    rank = torch.arange(len(bins), device=bins.device) - first[bins]
    return near[order[rank < needed[bins]]].sort().values
