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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from freemoe.domain_experts.importance import METRICS, check_finite, patch_scores, seeded, spread_patches
from freemoe.families.weights import Weight
from freemoe.recipes import BandSection


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

    def covers(self, weight: Weight) -> bool:
        """Whether the rule touches this weight at all."""
        inside = self.layers is None or self.layers[0] <= weight.layer < self.layers[1]
        return inside and self.sublayers in ("both", weight.sublayer)


def grid(section: BandSection, metric: str, seed: int) -> list[Band]:
    """Every band of a recipe's grid for one metric, in ascending order."""
    return [
        Band(metric, a, b, section.p, section.scope, section.sublayers, section.layers, section.patch, seed)
        for a, b in section.edges()
    ]


Norm = Callable[[str], Tensor]  # tap -> (E, C) fp32


def band_scores(band: Band, weight: Weight, norm: Norm | None) -> Tensor:
    """Importance of every unit that is ranked, shaped for ranking: ``(E, G, N)`` fp32."""
    metric = METRICS.get(band.metric)
    needed = norm(weight.tap) if metric.needs == "norms" and norm is not None else None
    generator = seeded(band.seed, weight.name) if metric.needs == "seed" else None
    scores = metric.scores(weight.view().detach(), needed, None, generator)
    scores = patch_scores(check_finite(scores, weight.name), band.patch)
    return scores.flatten(1)[:, None, :] if band.scope == "layer" else scores


def ranking(scores: Tensor) -> Tensor:
    """Ascending order of the last axis, equal scores in the order of their columns: ``(E, G, N)`` int64."""
    return torch.sort(scores, dim=-1, stable=True).indices


def rank_range(start: float, end: float, size: int) -> tuple[int, int]:
    """First rank inside and first rank above the band of ``size`` ranked units."""
    return round(start * size), round(end * size)


def ends(order: Tensor, start: float, end: float) -> tuple[Tensor | None, Tensor | None]:
    """Columns of the weights at the band's two ends, from the ranking.

    Args:
        order: ``(E, G, N)`` ascending order.
        start: Share where the band begins.
        end: Share where it ends (not included).

    Returns:
        ``(E, G)`` column of the first weight inside, and of the first weight above; None where the band reaches that
        end of the ranking. An empty band has the same column at both ends.
    """
    size = order.shape[-1]
    low, high = rank_range(start, end, size)
    if low >= high:
        low = high = min(low, size - 1)
    lower = None if low == 0 else order[..., low]
    upper = None if high >= size else order[..., high]
    return lower, upper


def inside(scores: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """Mask of the weights between two ends; needs no sorting.

    Args:
        scores: ``(E, G, N)``.
        lower: ``(E, G)`` column of the first weight inside, or None for the bottom.
        upper: ``(E, G)`` column of the first weight above, or None for the top.

    Returns:
        ``(E, G, N)`` bool: (score, column) lies in [lower, upper) in the order of score, then column.
    """
    columns = torch.arange(scores.shape[-1], device=scores.device)
    mask = torch.ones_like(scores, dtype=torch.bool)
    if lower is not None:
        at = lower.long()[..., None]
        threshold = scores.gather(-1, at)
        mask &= (scores > threshold) | ((scores == threshold) & (columns >= at))
    if upper is not None:
        at = upper.long()[..., None]
        threshold = scores.gather(-1, at)
        mask &= (scores < threshold) | ((scores == threshold) & (columns < at))
    return mask


def positions_from_mask(mask: Tensor, band: Band, weight: Weight) -> Tensor:
    """Sorted flat positions in (experts, rows, columns) order, from a mask over ranked units ``(E, G, N)``."""
    side = band.patch
    if band.scope == "layer":
        mask = mask.view(weight.experts, -(-weight.rows // side), -(-weight.columns // side))
    return spread_patches(mask, side, weight.rows, weight.columns).flatten().nonzero().flatten()


def band_positions(band: Band, weights: list[Weight], norm: Norm | None) -> dict[str, Tensor]:
    """Weights that a band switches off: name -> sorted flat positions. Ranks anew; see `Rankings` for many bands."""
    return Rankings(weights, norm).positions(band)


class Rankings:
    """The rankings of one subdomain, each made once and used by all bands that share it."""

    def __init__(self, weights: list[Weight], norm: Norm | None) -> None:
        self.weights = weights
        self.norm = norm
        self._orders: dict[tuple, Tensor] = {}

    def order(self, band: Band, weight: Weight) -> Tensor:
        """Ascending order ``(E, G, N)`` of a weight under a band's metric, kept as small as its columns allow."""
        key = (weight.name, band.metric, band.p, band.scope, band.patch, band.seed)
        if key not in self._orders:
            order = ranking(band_scores(band, weight, self.norm))
            small = torch.int16 if order.shape[-1] <= 2**15 else torch.int32
            self._orders[key] = order.to(small)
        return self._orders[key]

    def forget(self) -> None:
        """Drop the rankings; they are as large as the model, so only one subdomain's are held at a time."""
        self._orders.clear()

    def positions(self, band: Band) -> dict[str, Tensor]:
        """Weights that the band switches off: name -> sorted flat positions."""
        found = {}
        for weight in self.weights:
            if not band.covers(weight):
                continue
            order = self.order(band, weight)
            low, high = rank_range(band.start, band.end, order.shape[-1])
            if high <= low:
                continue
            mask = torch.zeros(order.shape, dtype=torch.bool, device=order.device)
            mask.scatter_(-1, order[..., low:high].long(), True)
            found[weight.name] = positions_from_mask(mask, band, weight)
        return found

    def ends(self, band: Band) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """What a band expert stores of every weight it touches: see `ends`."""
        found = {}
        for weight in self.weights:
            if band.covers(weight):
                order = self.order(band, weight)
                low, high = rank_range(band.start, band.end, order.shape[-1])
                if high > low:
                    lower, upper = ends(order, band.start, band.end)
                    found[weight.name] = (lower, upper)
        return found
