"""Bands of the importance ranking (MoDE Eq. 6, Algorithm 1): which weights a band switches off.

A band [a, b) is a share of the *ascending* ranking: 0 is the least important weight. With scope ``row`` every output
row ranks its own weights (MoDE), with ``layer`` one ranking spans the matrix (Free-MoE). The papers' tables rise
towards 95-100 %, which fits only a descending axis: their 95-100 % is our 0-5 %.

What is stored of a band is, per row, the *column* of the weight that stands at either end of the band. The threshold
itself is |W| * norm at that column, so two small integers say more than two floats would: among equal importances,
which stand in the order of their columns, they also say where the band begins.

Shapes: E fused experts, R rows, C columns; a ranking runs over the last axis of ``(E, G, N)``: row scope G = R, N = C,
layer scope G = 1, N = R * C (with patches, R and C count patches).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freemoe.core.threads import on_threads
from freemoe.domain_experts.rank.importance import METRICS, check_finite, patch_scores, seeded_generator, spread_patches
from freemoe.domain_experts.recipe import BandSection
from freemoe.kernels.sparse.bands import BandTile
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.weights import WeightMatrix


@dataclass(frozen=True)
class Band:
    """One candidate rule: rank by ``metric``, switch off the share [start, end) of the ascending ranking."""

    metric: str
    start: float
    end: float
    p: str = "2"
    scope: str = "row"
    sublayers: str = "both"
    layers: tuple[int, int] | None = None
    patch: int = 1
    seed: int = 0

    @property
    def name(self) -> str:
        """Short name, unique within a grid: what the journal and the report call it."""
        norm = f" p={self.p}" if self.metric == "wanda" else ""
        return f"{self.metric}{norm} {self.start * 100:g}-{self.end * 100:g} %"

    def covers_weight(self, weight: WeightMatrix) -> bool:
        """Whether the rule touches this weight at all."""
        inside = self.layers is None or self.layers[0] <= weight.layer < self.layers[1]
        return inside and self.sublayers in ("both", weight.sublayer)


def band_grid(section: BandSection, metric: str, seed: int) -> list[Band]:
    """Every band of a recipe's grid for one metric, in ascending order."""
    return [
        Band(metric, a, b, section.p, section.scope, section.sublayers, section.layers, section.patch, seed)
        for a, b in section.band_edges()
    ]


Norm = Callable[[str], Tensor]  # tap -> (E, C) fp32


def band_scores(band: Band, weight: WeightMatrix, norm: Norm | None) -> Tensor:
    """Importance of every unit that is ranked, shaped for ranking: ``(E, G, N)`` fp32."""
    metric = METRICS.get(band.metric)
    needed = norm(weight.tap).to(weight.device) if metric.needs == "norms" and norm is not None else None
    generator = seeded_generator(band.seed, weight.name) if metric.needs == "seed" else None
    scores = metric.scores(weight.read_values(), needed, None, generator)
    scores = patch_scores(check_finite(scores, weight.name), band.patch)
    return scores.flatten(1)[:, None, :] if band.scope == "layer" else scores


def rank_range(start: float, end: float, size: int) -> tuple[int, int]:
    """First rank inside and first rank above the band of ``size`` ranked units."""
    return round(start * size), round(end * size)


def columns_at(scores: Tensor, ranks: Sequence[int]) -> Tensor:
    """Columns of the weights that stand at some ranks of the ascending order.

    Equal scores stand in the order of their columns, as a stable sort has it.

    Args:
        scores: ``(E, G, N)`` fp32.
        ranks: K ranks, each from 0 to N - 1.

    Returns:
        ``(K, E, G)`` int32, or int64 where N needs it.
    """
    groups, size = scores.shape[:-1], scores.shape[-1]
    kind = torch.int32 if size < 2**31 else torch.int64
    flat, wanted = scores.reshape(-1, size).contiguous(), torch.tensor(ranks, dtype=torch.int64, device=scores.device)
    if scores.device.type != "cpu" or size >= 2**32 or int(flat.view(torch.int32).amin()) < 0:
        found = torch.sort(flat, dim=-1, stable=True).indices[:, wanted].to(kind)
    else:
        # The bits of floats that are not negative ascend with them: with the column below them they are integers that
        # are never equal, and numpy sorts those five times faster than torch sorts stably.
        found = torch.empty(len(flat), len(ranks), dtype=kind)
        bits, into, at = flat.view(torch.int32).numpy(), found.numpy(), wanted.numpy()
        columns = np.arange(size)

        def sort_rows(rows: slice) -> None:
            keys = (bits[rows].astype(np.int64) << 32) | columns
            keys.sort(-1)
            into[rows] = keys[:, at] & (2**32 - 1)

        on_threads(sort_rows, _row_parts(len(flat), size, 1 << 20))
    return found.t().reshape(len(ranks), *groups)


def _row_parts(rows: int, size: int, part: int) -> list[slice]:
    """Slices of whole rows with about ``part`` numbers each."""
    step = max(1, part // size)
    return [slice(first, first + step) for first in range(0, rows, step)]


def mask_between_ends(scores: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """Mask of the weights between two ends; needs no sorting.

    Args:
        scores: ``(E, G, N)``.
        lower: ``(E, G)`` column of the first weight inside, or None for the bottom.
        upper: ``(E, G)`` column of the first weight above, or None for the top.

    Returns:
        ``(E, G, N)`` bool: (score, column) lies in [lower, upper) in the order of score, then column.
    """
    size = scores.shape[-1]
    flat = scores.reshape(-1, size).contiguous()
    if lower is None and upper is None:
        return torch.ones_like(scores, dtype=torch.bool)
    at = [None if end is None else end.reshape(-1, 1).to(torch.int64) for end in (lower, upper)]
    ends = [None if end is None else (flat.gather(1, end), end) for end in at]
    if scores.device.type != "cpu":
        return _compare_with_ends(flat, torch.arange(size, device=scores.device), *ends).view(scores.shape)
    # Parts that stay in the cache, compared by numpy: several times faster than torch.
    mask = torch.empty(flat.shape, dtype=torch.bool)
    numbers, into, columns = flat.numpy(), mask.numpy(), np.arange(size)
    arrays = [None if end is None else (end[0].numpy(), end[1].numpy()) for end in ends]

    def compare_rows(rows: slice) -> None:
        here = [None if end is None else (end[0][rows], end[1][rows]) for end in arrays]
        into[rows] = _compare_with_ends(numbers[rows], columns, *here)

    on_threads(compare_rows, _row_parts(len(flat), size, 1 << 16))
    return mask.view(scores.shape)


def _compare_with_ends(scores: Any, columns: Any, lower: tuple[Any, Any] | None, upper: tuple[Any, Any] | None) -> Any:
    """`mask_between_ends` for arrays of torch or numpy: scores (rows, N), columns (N,), ends (score, column), each (rows, 1)."""
    if upper is None:
        return _not_below(scores, columns, *lower)  # type: ignore[misc]
    below = ~_not_below(scores, columns, *upper)
    return below if lower is None else below & _not_below(scores, columns, *lower)


def _not_below(scores: Any, columns: Any, threshold: Any, at: Any) -> Any:
    reached = scores >= threshold
    equal = scores == threshold
    # Almost always the weight at the end is the only one of its score.
    if int(equal.sum()) > len(scores):
        reached &= ~(equal & (columns < at))
    return reached


def expand_ranked_mask(ranked: Tensor, band: Band, weight: WeightMatrix) -> TensorMask:
    """The mask of a weight from booleans over ranked units ``(E, G, N)``."""
    side = band.patch
    if band.scope == "layer":
        ranked = ranked.view(weight.num_experts, -(-weight.num_rows // side), -(-weight.num_columns // side))
    return TensorMask.of_bools(spread_patches(ranked, side, weight.num_rows, weight.num_columns))


def mask_between(
    band: Band, weight: WeightMatrix, norm: Norm | None, lower: Tensor | None, upper: Tensor | None
) -> TensorMask:
    """What a band switches off of one weight, from the columns at its ends: no sorting.

    Args:
        band: The rule.
        weight: With the base's values.
        norm: Norms of its input, where the rule needs them.
        lower: ``(E, G)``, as for `mask_between_ends`.
        upper: ``(E, G)``, as for `mask_between_ends`.
    """
    return expand_ranked_mask(mask_between_ends(band_scores(band, weight, norm), lower, upper), band, weight)


def band_tile(
    band: Band, weight: WeightMatrix, norm: Norm | None, lower: Tensor | None, upper: Tensor | None
) -> BandTile | None:
    """The same as a rule for kernels that make the mask while they read the weight; None where they do not know such a band.

    Args: as for `mask_between`.
    """
    if band.metric not in ("wanda", "magnitude") or band.scope != "row" or band.patch != 1 or weight.is_fused:
        return None
    device = weight.device
    if band.metric == "wanda":
        assert norm is not None
        scale = norm(weight.tap)[0].float().to(device)
    else:
        scale = torch.ones(weight.num_columns, device=device)

    def end_columns(column: Tensor | None) -> Tensor:
        if column is None:
            return torch.full((weight.num_rows,), -1, dtype=torch.int32, device=device)
        return column.reshape(-1).to(device, torch.int32)

    return BandTile(scale, end_columns(lower), end_columns(upper))


def band_mask(band: Band, weights: Sequence[WeightMatrix], norm: Norm | None) -> Mask:
    """What a band switches off. Ranks anew; see `BandRankings` for many bands."""
    return BandRankings(weights, norm, [band]).mask_of_band(band)


Ends = tuple[Tensor | None, Tensor | None]
"""``(E, G)`` column of the first weight inside a band, and of the first above it; None at the ranking's own end."""


class BandRankings:
    """The rankings of one subdomain: each weight is sorted once for all bands that share a ranking.

    What is kept of a ranking is the columns at the ends of the bands, a few integers per row; a band's mask comes
    from comparing with the scores there.

    Args:
        weights: What the bands may touch, with the base's values.
        norm: Norms of the subdomain's inputs.
        bands: Those that will be asked for; others cost a sort of their own.
    """

    def __init__(self, weights: Sequence[WeightMatrix], norm: Norm | None, bands: Iterable[Band] = ()) -> None:
        self.weights = weights
        self.norm = norm
        self._bands = list(bands)
        self._columns: dict[tuple, dict[int, Tensor]] = {}

    def clear_cache(self) -> None:
        """Drop what is kept of the rankings."""
        self._columns.clear()

    def mask_of_band(self, band: Band) -> Mask:
        """Weights that the band switches off."""
        known = {w.name: w for w in self.weights}
        return Mask(
            {
                name: mask_between(band, known[name], self.norm, lower, upper)
                for name, (lower, upper) in self.band_ends(band).items()
            }
        )

    def band_ends(self, band: Band) -> dict[str, Ends]:
        """What a band expert stores of every weight that it touches."""
        found = {}
        for weight in self.weights:
            size = _ranking_size(band, weight)
            low, high = rank_range(band.start, band.end, size)
            if band.covers_weight(weight) and low < high:
                columns = self._columns_at(band, weight, [r for r in (low, high) if 0 < r < size])
                found[weight.name] = (columns.get(low), columns.get(high))
        return found

    def _columns_at(self, band: Band, weight: WeightMatrix, ranks: list[int]) -> dict[int, Tensor]:
        """Columns at ranks of a weight's ranking; sorts it for all bands at once."""
        ranking = _ranking_key(band)
        known = self._columns.setdefault((weight.name, ranking), {})
        if not all(r in known for r in ranks):
            size = _ranking_size(band, weight)
            both = [rank_range(b.start, b.end, size) for b in self._bands if _ranking_key(b) == ranking]
            wanted = sorted({r for pair in both for r in pair if 0 < r < size} | set(ranks))
            columns = columns_at(band_scores(band, weight, self.norm), wanted)
            known.update(zip(wanted, columns, strict=True))
        return known


def _ranking_key(band: Band) -> tuple:
    """What two bands must share to be shares of one ranking."""
    return band.metric, band.p, band.scope, band.patch, band.seed


def _ranking_size(band: Band, weight: WeightMatrix) -> int:
    """How many units one ranking of a weight has."""
    rows, columns = -(-weight.num_rows // band.patch), -(-weight.num_columns // band.patch)
    return rows * columns if band.scope == "layer" else columns
