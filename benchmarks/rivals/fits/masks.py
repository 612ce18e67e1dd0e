"""Rivals that switch single weights off and move none: our switches, and ranked ones at a share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.rivals.rival import Fitted, Materials, Terms
from freemoe.domain_experts.purify.greedy import PurifyResult, PurifyTask
from freemoe.domain_experts.purify.methods import METHODS
from freemoe.domain_experts.rank.calibrate import calibrate
from freemoe.domain_experts.rank.importance import METRICS
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix

NORM = 2.0
"""Wanda's norm of inputs."""


OFF = "off|"
"""How the name of a tensor with a coded mask begins; what follows is the weight's name."""


def mask_bytes(mask: Mask) -> int:
    """What a mask ships as."""
    return sum(code.numel() for code in mask.encode().values())


def off_only(weights: Sequence[WeightMatrix], mask: Mask, **more: Any) -> Fitted:
    """A result that is nothing but weights that are off."""
    kept = {OFF + name: code for name, code in mask.encode().items()}
    shipped = sum(code.numel() for code in kept.values())
    return Fitted(numbers=mask.count, bytes=shipped, share_off=mask.off_share(weights), tensors=kept, **more)


@contextmanager
def purified(
    model: Any, materials: Materials, terms: Terms, *, method: str, filled_by: str | None = None
) -> Iterator[Fitted]:
    """Signed purification of one way, at most the share off.

    With ``filled_by``, the weights of every row that this metric puts lowest go off too, until the share is met: a way that
    stops where its stopping loss says so is otherwise not comparable at a share.
    """
    looks: list[float] = []
    found = purify(model, materials, terms, method, looks)
    mask, facts = found.mask, {"best_round": found.best, "off": looks}
    if filled_by is not None:
        facts["share_before_filling"] = mask.off_share(materials.weights)
        mask = mask.union(lowest(model, materials, terms, filled_by, mask))
    with switched_off(materials.weights, mask):
        yield off_only(materials.weights, mask, losses=list(found.losses), facts=facts)


def purify(
    model: Any, materials: Materials, terms: Terms, method: str, looks: list[float] | None = None
) -> PurifyResult:
    """Single weights to switch off of the model as it stands; ``looks`` collects the share off per round."""
    seen = [] if looks is None else looks
    compute = "own" if terms.number_format == "float32" else "bfloat16"
    section = SaliencySection(method=method, budget=terms.share, compute=compute, **asdict(terms.schedule))
    gradient, stop = materials.batches(materials.gradient), materials.batches(materials.stop)
    text = materials.kind == "text"
    task = PurifyTask(
        model, materials.weights, gradient, stop, text, terms.seed, lambda number, loss, off: seen.append(off)
    )
    return METHODS.get(method).run(task, section)


@contextmanager
def ranked(model: Any, materials: Materials, terms: Terms, *, metric: str) -> Iterator[Fitted]:
    """In every row the same share of its weights off: those a metric of `rank.importance` puts lowest."""
    mask = lowest(model, materials, terms, metric)
    with switched_off(materials.weights, mask):
        yield off_only(materials.weights, mask)


def lowest(model: Any, materials: Materials, terms: Terms, metric: str, off: Mask | None = None) -> Mask:
    """The lowest share of every row by a metric, what is ``off`` already counted first."""
    row, norms = METRICS.get(metric), None
    if row.needs == "norms":
        batches = materials.batches(materials.gradient)
        norms = calibrate(model, materials.weights, ((b.ids, b.mask, b.labels * 0) for b in batches), 1)
    generator = torch.Generator().manual_seed(terms.seed)
    masks = {}
    for weight in materials.weights:
        norm = norms.input_norm(weight.tap, 0, NORM).to(weight.device) if norms is not None else None
        scores = row.scores(weight.canonical_view().float(), norm, None, generator)
        if off is not None and weight.name in off:
            scores = scores.masked_fill(off[weight.name].to_bools(scores.device).view(weight.shape), -torch.inf)
        masks[weight.name] = TensorMask.of_bools(lowest_in_rows(scores, terms.share).cpu())
    return Mask(masks)


def lowest_in_rows(scores: Tensor, share: float) -> Tensor:
    """(..., rows, columns) -> bool: the lowest ``share`` of every row; among equals the first.

    Where a row's share is no whole number, rows take turns in rounding up, so that a matrix as a whole has the share.
    """
    rows, columns = scores.shape[-2:]
    ends = torch.floor(share * columns * torch.arange(rows + 1, dtype=torch.float64, device=scores.device) + 0.5)
    ranks = scores.argsort(dim=-1, stable=True).argsort(dim=-1)
    return ranks < ends.diff()[:, None]
