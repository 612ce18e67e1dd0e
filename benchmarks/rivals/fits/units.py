"""Rivals that switch whole neurons or experts off: ours, Taylor's, NAEE, REAP, and drawn ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.rivals.fits.expert_drop import naee_scores, reap_scores
from benchmarks.rivals.fits.masks import mask_bytes
from benchmarks.rivals.rival import Fitted, Materials, Terms
from freemoe.domain_experts.purify.greedy import PurifyTask
from freemoe.domain_experts.recipe import UnitSection
from freemoe.domain_experts.structured.ranking import measure_importance
from freemoe.domain_experts.structured.rivals import random_scores, taylor_scores
from freemoe.domain_experts.structured.training import train_units
from freemoe.domain_experts.structured.units import ModelUnits, UnitsOff, find_units, lowest_units
from freemoe.models.switching import switched_off


def counts_for(units: ModelUnits, share: float, size: int) -> list[int]:
    """Units off in every layer, the same share of each, that come nearest to a share of ``size`` weights.

    Every layer keeps what it must.
    """
    inside = sum(layer.count * layer.weights_of_one for layer in units.layers)
    part = min(1.0, share * size / inside)
    return [min(layer.count - layer.least, math.floor(part * layer.count + 0.5)) for layer in units.layers]


@contextmanager
def ranked(model: Any, materials: Materials, terms: Terms, *, kind: str, by: str) -> Iterator[Fitted]:
    """The lowest units by a score (``taylor``, ``naee``, ``reap`` or ``random``), as many in every layer."""
    units = find_units(model, kind)
    counts = counts_for(units, terms.share, materials.size)
    batches = materials.batches(materials.gradient)
    if by == "taylor":
        scores = [taylor_scores(w.gain) for w in measure_importance(model, units, batches)]
    elif by == "naee":
        scores = naee_scores(model, units, batches, counts)
    elif by == "reap":
        scores = reap_scores(model, materials.weights, units, batches)
    else:
        scores = random_scores(units, terms.seed)
    with _off(materials, units, lowest_units(units, scores, counts)) as fitted:
        yield fitted


@contextmanager
def trained(model: Any, materials: Materials, terms: Terms, *, kind: str) -> Iterator[Fitted]:
    """The units that straight-through training found, as many in every layer."""
    units = find_units(model, kind)
    counts = counts_for(units, terms.share, materials.size)
    if not any(counts):
        with _off(materials, units, {}) as fitted:
            yield fitted
        return
    gradient, stop = materials.batches(materials.gradient), materials.batches(materials.stop)
    # The layers of a family have one width, so one share means these counts.
    section = UnitSection(off=(counts[0] / units.layers[0].count,), **asdict(terms.schedule))
    task = PurifyTask(model, materials.weights, gradient, stop, seed=terms.seed)
    curve = train_units(task, units, section, multiple=1)
    (point,) = curve.points
    with _off(materials, units, point.off) as fitted:
        fitted.losses = [curve.base, point.loss]
        yield fitted


@contextmanager
def _off(materials: Materials, units: ModelUnits, off: UnitsOff) -> Iterator[Fitted]:
    mask, number = units.mask(off), units.number_off(off)
    with switched_off(materials.weights, mask):
        # Which units they are is all that ships.
        shipped = min(mask_bytes(mask), (units.num_units + 7) // 8)
        yield Fitted(
            numbers=number,
            bytes=shipped,
            share_off=mask.off_share(materials.weights),
            facts={"units": {"kind": units.kind, "off": number, "of": units.num_units}},
        )
