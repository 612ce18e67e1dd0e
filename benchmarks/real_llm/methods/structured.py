"""Methods that switch off whole neurons; importing this module registers them.

Structured purification, the same with single switches, and rivals at equal counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_llm.cells import Cell
from benchmarks.real_llm.methods.weights import METHODS, Stand
from benchmarks.rivals.fits.masks import purify
from benchmarks.rivals.rival import Fitted
from freemoe.domain_experts.expert import DomainExpert, unit_expert
from freemoe.domain_experts.purify.greedy import PurifyTask
from freemoe.domain_experts.recipe import UnitSection
from freemoe.domain_experts.structured.fitting import multiple_of
from freemoe.domain_experts.structured.measure import compare_cost
from freemoe.domain_experts.structured.ranking import measure_importance
from freemoe.domain_experts.structured.rivals import rival_scores
from freemoe.domain_experts.structured.shrink import shrink
from freemoe.domain_experts.structured.training import train_units
from freemoe.domain_experts.structured.units import ModelUnits, UnitsOff, find_units, lowest_units, numbers_off
from freemoe.models.mask import Mask
from freemoe.models.precision import held_in
from freemoe.models.switching import switched_off

KIND = "neuron"
_NAME = "units"
SINGLES = 0.01
"""Share of all weights that may go off as single switches inside what the neurons leave."""
ALONE, JOINT, FREE = "structured", "structured-switches", "structured-free-switches"
RIVALS = ("wanda", "taylor", "activation")
SHARES = (0.1, 0.2, 0.3)
TARGET = 0.2

SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    ALONE: tuple({"budget": b} for b in SHARES),
    **{f"units-{name}": tuple({"budget": b} for b in SHARES) for name in RIVALS},
    JOINT: tuple({"budget": b} for b in SHARES),
}
"""The settings that every text is measured at, in this order."""


def tiny_cells(base: str) -> list[Cell]:
    """T15b: a tiny base and two texts far from it, neurons and single switches off together."""
    wikitext, gsm8k = Cell("home", "wikitext", base=base), Cell("home", "gsm8k", base=base)
    return [
        wikitext,
        Cell("home", "wikitext", FREE, TARGET, base=base),
        gsm8k,
        Cell("home", "gsm8k", JOINT, 0.25, base=base),
    ]


def passes(method: str, stop: float, gradient: float, looks: float, trained: float) -> float | None:
    """About what a method of this module takes, in tokens' forward passes like its parts are; None for the others."""
    if method not in (*SETTINGS, FREE):
        return None
    if method.startswith("units-"):
        return gradient
    neurons = gradient + 5 * stop + 2 * looks + trained
    inside = gradient + looks + trained
    return {ALONE: neurons, FREE: neurons + inside}.get(method, inside)


def begins_with(cell: Cell) -> Cell | None:
    """The cell whose result one of a text begins with: neurons for switches beside them, one pass for all rivals' scores."""
    if cell.method == JOINT:
        return replace(cell, method=ALONE)
    first = replace(cell, method=f"units-{RIVALS[0]}", budget=SHARES[0], rank=0, rate=0.0)
    return first if cell.method.startswith("units-") and cell != first else None


# ------------------------------------------------------------------------------------------ neurons


@contextmanager
def structured(stand: Stand, *, layout: Any = "even", singles: bool = False) -> Iterator[Fitted]:
    """Neurons that training found, exactly the cell's budget of them; with ``singles`` single switches inside the rest.

    Where the cell stands on one that found the neurons alone, single switches begin with those.
    """
    units = find_units(stand.model, KIND)
    if stand.found:
        off = units.of_lines(DomainExpert.from_parts({"name": _NAME, "kind": "unit", "unit": KIND}, stand.found).lines)
        losses, facts = [], {"layout": layout}
    else:
        off, losses, facts = _train(stand, units, layout)
    inside = Mask()
    if singles:
        with switched_off(stand.weights, units.mask(off)):
            found = purify(stand.model, stand.materials, replace(stand.terms, share=SINGLES), "learned")
        inside, losses = found.mask, [*losses, *found.losses[1 if losses else 0 :]]
    fitted = _cut(stand, units, off, inside, facts)
    fitted.losses = losses
    with switched_off(stand.weights, units.mask(off).union(inside)):
        yield fitted


def _train(stand: Stand, units: ModelUnits, layout: Any) -> tuple[UnitsOff, list[float], dict[str, Any]]:
    """Neurons for the cell's budget, the stopping losses before and after, and what the record says of the training."""
    with held_in(stand.model, getattr(torch, stand.protocol.train)):
        gradient, stop = stand.batches(stand.data.gradient), stand.batches(stand.data.stop)
        section = UnitSection(off=(stand.cell.budget,), layout=layout, **asdict(stand.schedule))
        task = PurifyTask(stand.model, stand.weights, gradient, stop, seed=stand.cell.seed)
        curve = train_units(task, units, section, multiple=multiple_of(UnitSection(unit=KIND), stand.model.device))
    (point,) = curve.points
    facts = {
        "start": curve.start,
        "stopping_loss_of_base": curve.base,
        "stopping_loss_of_units": point.loss,
        "looks": [list(look) for look in curve.looks],
        "layout": layout,
    }
    return point.off, [curve.base, point.loss], facts


@contextmanager
def ranked(stand: Stand, rival: str) -> Iterator[Fitted]:
    """A rival's neurons, as many in every layer as `structured` switches off, from one pass over the same documents."""
    units = find_units(stand.model, KIND)
    off, measured = _ranked(stand, units, rival)
    found = _cut(stand, units, off, Mask(), {"layout": "even", "speed": {}})
    found.tensors |= measured
    with switched_off(stand.weights, units.mask(off)):
        yield found


def _ranked(stand: Stand, units: ModelUnits, rival: str) -> tuple[UnitsOff, dict[str, Tensor]]:
    """A rival's neurons for the cell's budget; and all rivals' scores, where no other cell has measured them."""
    key, measured = "score|{}|{}".format, {}
    if not stand.found:
        with held_in(stand.model, getattr(torch, stand.protocol.train)):
            scores = rival_scores(units, measure_importance(stand.model, units, stand.batches(stand.data.gradient)))
        for name, layers in scores.items():
            measured |= {key(name, layer.number): s for layer, s in zip(units.layers, layers, strict=True)}
    known = stand.found or measured
    number = numbers_off(units, stand.cell.budget, "even", multiple_of(UnitSection(unit=KIND), stand.model.device))
    return lowest_units(units, [known[key(rival, layer.number)] for layer in units.layers], number), measured


def _cut(stand: Stand, units: ModelUnits, off: UnitsOff, singles: Mask, facts: dict[str, Any]) -> Fitted:
    """What neurons (and single weights) off ship, and how fast the model is without them."""
    kept = unit_expert(_NAME, KIND, units.line_indices(off), singles).to_tensors()
    inside = sum(len(off[layer.number]) * layer.weights_of_one for layer in units.layers if layer.number in off)
    weights = inside + singles.count
    facts = {"units": {"off": units.number_off(off), "of": units.num_units, "share": units.share_off(off)}, **facts}
    if "speed" not in facts:
        facts["speed"] = cut_speed(stand, units, off)
    return Fitted(
        numbers=units.number_off(off) + singles.count,
        bytes=sum(t.numel() * t.element_size() for t in kept.values()),
        share_off=weights / sum(w.size for w in stand.weights),
        tensors=kept,
        facts=facts,
    )


def cut_speed(stand: Stand, units: ModelUnits, off: UnitsOff) -> dict[str, Any]:
    """Tokens per second of the smaller plain checkpoint and of the dense model, in turns, in the scoring format and in fp32.

    Returns:
        ``prefill`` and ``decode`` of the smaller one in the scoring format; ``dense``: the same of the whole one; ``float32``:
        all of that once more; ``prompt``, its tokens; ``parameters`` and ``operations`` per token of both.
    """
    score, seen = stand.protocol.score, {}
    for number_format in dict.fromkeys(("float32", score)):
        # Copies: casting weights anew for every token is no part of a checkpoint's speed.
        dense = copy.deepcopy(stand.model).to(getattr(torch, number_format))
        seen[number_format] = compare_cost(dense, shrink(dense, units, off, pad=True))
    speeds = {
        number_format: {
            "prefill": both["prefill"][1],
            "decode": both["decode"][1],
            "dense": {"prefill": both["prefill"][0], "decode": both["decode"][0]},
        }
        for number_format, both in seen.items()
    }
    sizes = {"prompt": seen[score]["prefill_tokens"], **{k: seen[score][k] for k in ("parameters", "operations")}}
    return {**speeds[score], "float32": speeds["float32"], **sizes}


METHODS.add(ALONE, structured, "neurons off, as many in every layer")
METHODS.add(JOINT, partial(structured, singles=True), "the same, then single switches inside what is left")
METHODS.add(FREE, partial(structured, layout="free", singles=True), "the same, layers left with different numbers")
for _name in RIVALS:
    METHODS.add(f"units-{_name}", partial(ranked, rival=_name), f"neurons lowest by {_name}, as many in every layer")
