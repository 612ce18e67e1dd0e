"""Products of tokens whose experts switch off a band of every row's ranking by |W| * scale: the mask is made while W is read.

Nothing is held of such an expert but the scales of the columns and two columns per row (`domain_experts.rank.bands`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freemoe.kernels.optional import INTERPRETED, falls_back_to
from freemoe.kernels.sparse import rows

# Rows and columns of a weight that a block multiplies at once.
_TILE = (32, 64)


@dataclass(frozen=True, eq=False)
class BandTile:
    """The band of one weight (N, K): from the place at ``low`` up to the one at ``high`` of each row's ascending ranking."""

    scale: Tensor  # ``(K,)`` float32, what |W| is multiplied with
    low: Tensor  # ``(N,)`` int32: the column of the first place inside; -1: the ranking's bottom
    high: Tensor  # ``(N,)`` int32: the column of the first place above; -1: its top

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors in memory."""
        return sum(t.numel() * t.element_size() for t in (self.scale, self.low, self.high))

    def off_mask(self, weight: Tensor) -> Tensor:
        """``(N, K)`` bool: what of the weight is off; equal scores stand in the order of their columns."""
        scores = weight.float().abs() * self.scale.to(weight.device)
        columns = torch.arange(scores.shape[1], device=weight.device)

        def is_beyond(end: Tensor, without: bool) -> Tensor:
            at = end.to(weight.device).long()[:, None]
            edge = scores.gather(1, at.clamp(min=0))
            return torch.where(at < 0, without, (scores > edge) | ((scores == edge) & (columns >= at)))

        return is_beyond(self.low, True) & ~is_beyond(self.high, False)


@dataclass(frozen=True, eq=False)
class BandTiles:
    """The bands of several experts of one weight."""

    tiles: tuple[BandTile, ...]  # One for each
    scales: Tensor  # ``(G, K)``
    ends: tuple[Tensor, Tensor]  # ``(G, N)`` each

    @classmethod
    def from_tiles(cls, tiles: Sequence[BandTile]) -> BandTiles:
        """Stack tiles of one shape, in this order."""
        low, high = (torch.stack([getattr(tile, end) for tile in tiles]) for end in ("low", "high"))
        return cls(tuple(tiles), torch.stack([tile.scale for tile in tiles]), (low, high))


def tiles_available(weight: Tensor) -> bool:
    """Whether a compiled kernel makes bands' masks of this weight."""
    return weight.device.type == "cuda" and weight.is_contiguous() and rows.loops_available(weight.dtype, "cuda")


def reference_tiled_products(
    x: Tensor, weight: Tensor, bands: BandTiles, tokens: np.ndarray, starts: np.ndarray
) -> Tensor:
    """As `tiled_products`, by a masked copy of the weight for every expert: what is quicker for many tokens of each."""
    own, _ = rows.lists_on(tokens.tobytes(), starts.tobytes(), x.device)
    parts = own.split(np.diff(starts).tolist())
    masked = (weight.masked_fill(tile.off_mask(weight), 0) for tile in bands.tiles)
    return torch.cat([torch.nn.functional.linear(x[p].to(weight.dtype), w) for p, w in zip(parts, masked, strict=True)])


@falls_back_to(reference_tiled_products)
def tiled_products(x: Tensor, weight: Tensor, bands: BandTiles, tokens: np.ndarray, starts: np.ndarray) -> Tensor:
    """``x[tokens] @ weight.T`` without what the tokens' experts have off, which is found in the tile that is multiplied.

    Args:
        x: (T, K) of the weight's type.
        weight: (N, K), for which there are `tiles_available`.
        bands: G of them.
        tokens: (n,) int64, expert by expert.
        starts: (G + 1,) int64: where in ``tokens`` each expert's begin.

    Returns:
        (n, N), in the order of ``tokens``.
    """
    from freemoe.kernels.sparse.triton_loops import band_products

    own, blocks = rows.lists_on(tokens.tobytes(), starts.tobytes(), x.device)
    y = x.new_empty(len(own), len(weight))
    high, across = _TILE
    band_products[(-(-len(weight) // high), len(blocks))](
        x.contiguous(), weight, y, own, blocks, bands.scales, *bands.ends, *weight.shape,
        T=rows.TOKENS, N=high, K=across, UPCAST=INTERPRETED,
    )  # fmt: skip
    return y
