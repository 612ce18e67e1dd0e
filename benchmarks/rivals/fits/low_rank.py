"""Rivals that cut matrices to a low rank: LASER (Sharma et al. 2023), and its cut in every matrix at a share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.rivals.fits.tuned import VALUE_BYTES
from benchmarks.rivals.rival import Fitted, Materials, Terms, restored
from freemoe.domain_experts.purify.batches import mean_loss
from freemoe.models.weights import WeightMatrix

RANKS = (0.5, 0.25, 0.1, 0.01)
"""Shares of the largest rank that are tried, as in the paper's range."""
FIRST_RANK = 0.1
"""The rank at which every matrix is tried once."""
_KEPT, _FINALISTS, _ROUNDS = 16, 4, 4


def truncated(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of a rank (Eckart & Young): (rows, columns), fp32."""
    left, values, right = torch.linalg.svd(matrix.float(), full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def rank_for(rows: int, columns: int, share: float) -> int:
    """The largest rank whose two factors have at most ``1 - share`` of the matrix's numbers; at least 1."""
    return max(1, math.floor((1 - share) * rows * columns / (rows + columns) + 1e-9))


class Cut(NamedTuple):
    """One matrix, by its number, at what is left of its rank."""

    weight: int
    rank: int


@contextmanager
def laser(model: Any, materials: Materials, terms: Terms) -> Iterator[Fitted]:
    """The one cut whose stopping loss is best; none, where none is better than the base's."""
    weights = materials.weights
    with restored(model, weights):
        base = mean_loss(model, materials.batches(materials.stop))
        finalists, tried = _searched(model, materials, terms)
        losses = _losses(model, materials, finalists, len(materials.stop))
        best = min(losses, key=lambda cut: losses[cut])
        if losses[best] >= base:
            yield Fitted(losses=[base, losses[best]], facts={"cut": None, "tried": tried})
            return
        weight = weights[best.weight]
        _put(weight, truncated(weight.canonical_view()[0], best.rank))
        whole, left = weight.num_rows * weight.num_columns, best.rank * (weight.num_rows + weight.num_columns)
        facts = {"cut": {"weight": weight.name, "rank": best.rank}, "tried": tried}
        size, share_off = VALUE_BYTES * min(left, whole), max(0, whole - left) / materials.size
        yield Fitted(losses=[base, losses[best]], numbers=left, bytes=size, share_off=share_off, facts=facts)


def rank_of(weight: WeightMatrix, share: float) -> int:
    """A share of the largest rank that a matrix can have; at least 1."""
    return max(1, round(share * min(weight.num_rows, weight.num_columns)))


def _searched(model: Any, materials: Materials, terms: Terms) -> tuple[list[Cut], int]:
    """The few cuts to be compared on all stopping documents, and how many were tried.

    The paper tries all on all. Here every matrix is tried at one rank on a few documents, the best ones at every rank on
    more, and so on: about as many tokens as a trained rival's steps take.
    """
    weights, stop = materials.weights, len(materials.stop)
    each = sum(int(b.mask.sum()) for b in materials.batches(materials.stop)) / stop
    afforded = 3 * terms.schedule.steps * terms.schedule.step_tokens / (_ROUNDS * each)
    first = [Cut(i, rank_of(w, FIRST_RANK)) for i, w in enumerate(weights)]
    losses = _losses(model, materials, first, max(1, min(stop, int(afforded / len(first)))))
    best = sorted(first, key=lambda cut: losses[cut])[:_KEPT]
    alive = list(dict.fromkeys(Cut(c.weight, rank_of(weights[c.weight], s)) for c in best for s in RANKS))
    tried = len(set(first) | set(alive))
    while len(alive) > _FINALISTS:
        losses = _losses(model, materials, alive, max(1, min(stop, int(afforded / len(alive)))))
        alive = sorted(alive, key=lambda cut: losses[cut])[: max(_FINALISTS, len(alive) // 4)]
    return alive, tried


def _losses(model: Any, materials: Materials, cuts: Sequence[Cut], documents: int) -> dict[Cut, float]:
    """Mean stopping loss over the first so many documents, one cut at a time."""
    batches = materials.batches(materials.stop[:documents])
    found: dict[Cut, float] = {}
    for number in dict.fromkeys(cut.weight for cut in cuts):
        weight = materials.weights[number]
        before = weight.canonical_view()[0].clone()
        left, values, right = torch.linalg.svd(before.float(), full_matrices=False)
        for cut in (c for c in cuts if c.weight == number):
            _put(weight, (left[:, : cut.rank] * values[: cut.rank]) @ right[: cut.rank])
            found[cut] = mean_loss(model, batches)
        _put(weight, before)
    return found


@contextmanager
def everywhere(model: Any, materials: Materials, terms: Terms) -> Iterator[Fitted]:
    """Every matrix at the rank whose factors leave the share."""
    left = 0
    with restored(model, materials.weights):
        for weight in materials.weights:
            rank = rank_for(weight.num_rows, weight.num_columns, terms.share)
            left += rank * (weight.num_rows + weight.num_columns)
            _put(weight, truncated(weight.canonical_view()[0], rank))
        yield Fitted(numbers=left, bytes=VALUE_BYTES * left, share_off=1 - left / materials.size)


@torch.no_grad()
def _put(weight: WeightMatrix, values: Tensor) -> None:
    weight.canonical_view()[0].copy_(values)
