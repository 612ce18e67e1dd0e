"""How a conversion comes to its structure: by training, or by a rival's rule; each step a unit of work that is done once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from freemoe.core.errors import DataError
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.unit_state import UnitState
from freemoe.recipes import ConvertRecipe
from freemoe.text.blocks import Blocks
from freemoe.tomoe.devices import Devices
from freemoe.tomoe.gates.discretize import structure_of
from freemoe.tomoe.gates.initialise import Worth, clusters, worths
from freemoe.tomoe.gates.train import History, Trainer
from freemoe.tomoe.material import ConversionContext, prepare
from freemoe.tomoe.measure import TextScore, score_text
from freemoe.tomoe.structures.masked import masked
from freemoe.tomoe.structures.rivals import Activity, activities, rival
from freemoe.tomoe.structures.structure import (
    Structure,
    active_parameters,
    check,
    dense_parameters,
    from_tensors,
    to_tensors,
    whole,
)
from freemoe.training.loop import Kept, Store, looks, train

_WORTHS = ("qk", "vo", "vo_ranked", "mlp")
_MEAN = "mean_"


def decide(
    context: ConversionContext, devices: Devices | None = None
) -> tuple[Structure, list[list[float]], list[dict[str, float]]]:
    """The structure of the recipe's method; for a learned one its history and its curve on held-out text."""
    recipe, run = context.recipe, context.own_run
    if recipe.active == 1:
        return whole(context.sublayers, recipe.experts), [], []
    if recipe.method != "tomoe":
        return best_variant(context, recipe.method)[0], [], []
    devices = devices or Devices()
    trainer = Trainer(context.model, context.sublayers, recipe, context.train, devices)
    if recipe.gates.start == "statistics":
        trainer.begin(_worth(context))
    devices.wait()
    curve = _train(context, trainer)
    structure = from_tensors(run.tensors(_best(recipe, curve), lambda: _lost(run)))
    check(structure, context.sublayers)
    return structure, trainer.history.rows, curve


def follow(recipe: ConvertRecipe, devices: Devices) -> None:
    """What every process but the first does: train along, from the statistics and the state that the first one kept."""
    if recipe.active == 1 or recipe.method != "tomoe":
        return
    context = prepare(recipe, None, None)
    trainer = Trainer(context.model, context.sublayers, recipe, context.train, devices)
    devices.wait()
    if recipe.gates.start == "statistics":
        trainer.begin(_worths(RunFolder.peek(recipe.output, "clusters"), RunFolder.peek(recipe.output, "worth")))
    kept = devices.told(0)
    if kept > 0:
        trainer.load(RunFolder.peek(recipe.output, f"state|{kept}"))
    devices.wait()
    trainer.run(recipe.train.steps)


def _lost(run: RunFolder) -> dict[str, Tensor]:
    raise DataError(f"A saved state is missing from {str(run.partial)!r}. Start over with --no-resume.")


def _structure(context: ConversionContext, trainer: Trainer) -> Structure:
    widths = trainer.widths(context.recipe.active)
    return structure_of(
        trainer.hypernetwork, trainer.gating, context.sublayers, widths, context.model, context.held_out, trainer.step
    )


def _clusters(context: ConversionContext) -> list[tuple[Tensor, Tensor]]:
    def work() -> dict[str, Tensor]:
        recipe, kept = context.recipe, context.own_run.state("clusters")
        found = clusters(context.model, context.sublayers, context.statistics, recipe.experts, recipe.seed, kept)
        return {f"{n}.{kind}": t for n, pair in enumerate(found) for kind, t in zip("wb", pair, strict=True)}

    return _pairs(context.own_run.tensors("clusters", work))


def _pairs(kept: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(kept[f"{n}.w"], kept[f"{n}.b"]) for n in range(len(kept) // 2)]


def _worth(context: ConversionContext) -> list[Worth]:
    routers = _clusters(context)

    def work() -> dict[str, Tensor]:
        with context.progress.stage("statistics", len(context.statistics)) as advance:
            tokens, kept = context.recipe.train.batch_tokens, context.own_run.state("worth")
            found = worths(context.model, context.sublayers, context.statistics, routers, tokens, advance, kept)
        return {f"{n}.{kind}": getattr(w, kind) for n, w in enumerate(found) for kind in _WORTHS}

    worth = context.own_run.tensors("worth", work)
    return _worths(context.own_run.tensors("clusters", dict), worth)


def _worths(routers: dict[str, Tensor], kept: dict[str, Tensor]) -> list[Worth]:
    return [Worth(*router, *(kept[f"{n}.{kind}"] for kind in _WORTHS)) for n, router in enumerate(_pairs(routers))]


def _train(context: ConversionContext, trainer: Trainer) -> list[dict[str, float]]:
    """Train to the end, from the last saved state where there is one; returns the curve on held-out text.

    Only the state of the last mark and the structure of the best one are kept on disk.
    """
    run, settings = context.own_run, context.recipe.train
    # Of several processes only the first one writes, and all others must go on from the same state: that of a look.
    alone = trainer.devices.count == 1
    kept = Kept(Store(run), "state", trainer.state, trainer.load, between=alone)
    begun = trainer.devices.told(kept.last(settings.steps, settings.save_every))
    trainer.devices.wait()
    before = [mark for mark in looks(settings.steps, settings.save_every) if mark < begun]
    curve: list[dict[str, float]] = [run.journal.unit(f"held-out|{mark}", dict) for mark in before]

    def look(mark: int) -> bool:
        def work() -> dict[str, float]:
            unit = run.state(f"held-out|{mark}")
            point = {"step": float(mark), **_candidate(context, trainer, f"structure|{mark}", unit.part("now"))}
            if mark and settings.mean_window:
                with trainer.mean.used():
                    found = _candidate(context, trainer, f"structure|{_MEAN}{mark}", unit.part("mean"))
                point |= {f"{_MEAN}{name}": value for name, value in found.items()}
            return point

        point = run.unit(f"held-out|{mark}", work)
        curve.append(point)
        _forget(context, curve)
        if mark:
            latest = dict(zip(History.columns, trainer.history.rows[-1], strict=True))
            context.progress.say(
                f"step {mark}: active {latest['active']:.3f}, KL {latest['distillation']:.4f}, balance "
                f"{latest['balance']:.3f}, held-out perplexity {point['perplexity']:.3f} at {point['active']:.3f} active"
                + (f", {point['mean_perplexity']:.3f} of the gates' mean" if "mean_perplexity" in point else "")
            )
        return False

    with context.progress.stage("training", settings.steps) as advance:
        train(lambda n: trainer.run(n + 1), look, settings.steps, settings.save_every, kept=kept, advance=advance)
    return curve


def _candidate(context: ConversionContext, trainer: Trainer, name: str, kept: UnitState) -> dict[str, float]:
    """Keep the structure that the gates have now, and score it on held-out text."""
    structure = from_tensors(context.own_run.tensors(name, lambda: to_tensors(_structure(context, trainer))))
    with masked(context.model, structure, context.sublayers):
        score = score_text(context.model, context.held_out, kept=kept)
    share = active_parameters(structure, context.sublayers) / dense_parameters(context.sublayers)
    return {"perplexity": score.perplexity, "accuracy": score.accuracy, "active": share}


def _names(curve: Sequence[dict[str, float]]) -> list[tuple[str, float, float]]:
    """Every structure that was scored on held-out text: its unit, perplexity and active share."""
    return [
        (f"structure|{kind}{int(point['step'])}", point[f"{kind}perplexity"], point[f"{kind}active"])
        for point in curve
        for kind in ("", _MEAN)
        if f"{kind}perplexity" in point
    ]


def _best(recipe: ConvertRecipe, curve: Sequence[dict[str, float]]) -> str:
    """The unit of the structure that is best on held-out text among those within the budget; the last where none is."""
    named = _names(curve)
    within = [one for one in named if one[2] <= 1.01 * recipe.active]
    return min(within, key=lambda one: one[1])[0] if within else named[-1][0]


def _forget(context: ConversionContext, curve: Sequence[dict[str, float]]) -> None:
    """Delete every structure that is not the best."""
    best = _best(context.recipe, curve)
    for name, _, _ in _names(curve):
        if name != best:
            context.own_run.drop(name)


def scored(
    context: ConversionContext, name: str, blocks: Blocks, structure: Structure | None, part: str = "test"
) -> TextScore:
    """Score one structure (None: the dense model) on one part of the text, once per run."""

    def work() -> dict[str, Any]:
        place = (
            masked(context.model, structure, context.sublayers) if structure is not None else contextlib.nullcontext()
        )
        with place, context.progress.stage(f"{name} on {part} text", len(blocks)) as advance:
            return score_text(context.model, blocks, on_rows=advance, kept=context.own_run.state(unit)).to_dict()

    unit = f"score|{part}|{name}"
    return TextScore.from_dict(context.own_run.unit(unit, work))


def _activity(context: ConversionContext) -> list[Activity]:
    """What all rivals look at: one pass over the text of the statistics, kept."""
    names = [field.name for field in fields(Activity)]

    def work() -> dict[str, Tensor]:
        kept = context.own_run.state("activity")
        found = activities(context.model, context.sublayers, context.statistics, _clusters(context), kept)
        return {f"{n}.{name}": getattr(own, name).cpu() for n, own in enumerate(found) for name in names}

    kept, device = context.own_run.tensors("activity", work), context.model.device
    return [Activity(*(kept[f"{n}.{name}"].to(device) for name in names)) for n in range(len(context.sublayers))]


GATHERED = ("clusters", "activity")
"""Units whose tensors all rivals look at."""


def gather(context: ConversionContext) -> None:
    """Have what all rivals look at in the run's folder."""
    _activity(context)


def best_variant(context: ConversionContext, method: str) -> tuple[Structure, dict[str, float]]:
    """A rival with the attention whole and with the attention pruned like the rest: the better on held-out text."""
    routers, activity = _clusters(context), _activity(context)
    found = []
    for attention in (1.0, context.recipe.active):
        structure = rival(method, context.sublayers, activity, routers, context.recipe.active, attention)
        score = scored(context, f"{method}, attention {attention:g}", context.held_out, structure, "held-out")
        found.append((score.perplexity, attention, structure))
    _, attention, structure = min(found, key=lambda entry: entry[0])
    share = active_parameters(structure, context.sublayers) / dense_parameters(context.sublayers)
    return structure, {"attention": attention, "active": share}
