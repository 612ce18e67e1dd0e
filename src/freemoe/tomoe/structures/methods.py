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
from freemoe.evals.text_score import score_text
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.devices import DistributedContext
from freemoe.tomoe.gates.discretize import structure_of
from freemoe.tomoe.gates.initialise import WORTHS, LayerImportance, cluster_tokens, measure_layer_importance
from freemoe.tomoe.gates.train import HISTORY_COLUMNS, GateTrainer
from freemoe.tomoe.material import ConversionContext, prepare_context
from freemoe.tomoe.recipe import ConvertRecipe
from freemoe.tomoe.structures.masked import apply_structure
from freemoe.tomoe.structures.rivals import LayerActivity, make_baseline, measure_activity
from freemoe.tomoe.structures.structure import (
    Structure,
    active_share,
    dense_structure,
    from_tensors,
    require_structure_fits,
    to_tensors,
)
from freemoe.training.loop import TrainingCheckpoints, eval_steps, run_training_loop

_MEAN = "mean_"


def search_structure(
    context: ConversionContext, devices: DistributedContext | None = None
) -> tuple[Structure, list[list[float]], list[dict[str, float]]]:
    """The structure of the recipe's method; for a learned one its history and its curve on held-out text."""
    recipe, run = context.recipe, context.own_run
    if recipe.active == 1:
        return dense_structure(context.sublayers, recipe.experts), [], []
    if recipe.method != "tomoe":
        return best_variant(context, recipe.method)[0], [], []
    devices = devices or DistributedContext()
    trainer = GateTrainer(context.model, context.sublayers, recipe, context.train, devices)
    if recipe.gates.start == "statistics":
        trainer.start_from_statistics(_cached_importance(context))
    devices.wait_for_all()
    curve = _train_gates(context, trainer)
    structure = from_tensors(run.run_tensor_unit(_best_candidate(recipe, curve), lambda: _raise_missing_state(run)))
    require_structure_fits(structure, context.sublayers)
    return structure, trainer.history, curve


def run_worker_rank(recipe: ConvertRecipe, devices: DistributedContext) -> None:
    """What every process but the first does: train along, from the statistics and the state that the first one kept."""
    if recipe.active == 1 or recipe.method != "tomoe":
        return
    context = prepare_context(recipe, None, None)
    trainer = GateTrainer(context.model, context.sublayers, recipe, context.train, devices)
    devices.wait_for_all()
    if recipe.gates.start == "statistics":
        trainer.start_from_statistics(
            _importance_from_tensors(
                RunFolder.load_tensors(recipe.output, "clusters"), RunFolder.load_tensors(recipe.output, "worth")
            )
        )
    done = devices.broadcast_number(0)
    if done > 0:
        trainer.load_state(RunFolder.load_tensors(recipe.output, f"state|{done}"))
    devices.wait_for_all()
    trainer.train_until(recipe.train.steps)


def _raise_missing_state(run: RunFolder) -> dict[str, Tensor]:
    raise DataError(f"A saved state is missing from {str(run.partial)!r}. Start over with --no-resume.")


def _cached_clusters(context: ConversionContext) -> list[tuple[Tensor, Tensor]]:
    def compute_clusters() -> dict[str, Tensor]:
        recipe, checkpoint = context.recipe, context.own_run.unit_state("clusters")
        found = cluster_tokens(
            context.model, context.sublayers, context.statistics_blocks, recipe.experts, recipe.seed, checkpoint
        )
        return {f"{n}.{kind}": t for n, pair in enumerate(found) for kind, t in zip("wb", pair, strict=True)}

    return _router_pairs(context.own_run.run_tensor_unit("clusters", compute_clusters))


def _router_pairs(tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(tensors[f"{n}.w"], tensors[f"{n}.b"]) for n in range(len(tensors) // 2)]


def _cached_importance(context: ConversionContext) -> list[LayerImportance]:
    routers = _cached_clusters(context)

    def compute_importance() -> dict[str, Tensor]:
        with context.progress.stage("statistics", len(context.statistics_blocks)) as advance:
            tokens, checkpoint = context.recipe.train.batch_tokens, context.own_run.unit_state("worth")
            found = measure_layer_importance(
                context.model, context.sublayers, context.statistics_blocks, routers, tokens, advance, checkpoint
            )
        return {f"{n}.{kind}": getattr(w, kind) for n, w in enumerate(found) for kind in WORTHS}

    worth = context.own_run.run_tensor_unit("worth", compute_importance)
    return _importance_from_tensors(context.own_run.run_tensor_unit("clusters", dict), worth)


def _importance_from_tensors(routers: dict[str, Tensor], tensors: dict[str, Tensor]) -> list[LayerImportance]:
    return [
        LayerImportance(*router, *(tensors[f"{n}.{kind}"] for kind in WORTHS))
        for n, router in enumerate(_router_pairs(routers))
    ]


def _train_gates(context: ConversionContext, trainer: GateTrainer) -> list[dict[str, float]]:
    """Train to the end, from the last saved state where there is one; returns the curve on held-out text.

    Only the state of the last mark and the structure of the best one are kept on disk.
    """
    run, settings = context.own_run, context.recipe.train
    # Of several processes only the first one writes, and all others must go on from the same state: that of a look.
    alone = trainer.devices.count == 1
    checkpoints = TrainingCheckpoints(run, "state", trainer.to_state, trainer.load_state, between=alone)
    begun = trainer.devices.broadcast_number(checkpoints.last_step(settings.steps, settings.save_every))
    trainer.devices.wait_for_all()
    before = [mark for mark in eval_steps(settings.steps, settings.save_every) if mark < begun]
    curve: list[dict[str, float]] = [run.journal.run_unit(f"held-out|{mark}", dict) for mark in before]

    def evaluate_gates(mark: int) -> bool:
        def compute_point() -> dict[str, float]:
            unit = run.unit_state(f"held-out|{mark}")
            point = {
                "step": float(mark),
                **_score_candidate(context, trainer, f"structure|{mark}", unit.part_state("now")),
            }
            if mark and settings.mean_window:
                with trainer.mean.use_mean():
                    found = _score_candidate(context, trainer, f"structure|{_MEAN}{mark}", unit.part_state("mean"))
                point |= {f"{_MEAN}{name}": value for name, value in found.items()}
            return point

        point = run.run_unit(f"held-out|{mark}", compute_point)
        curve.append(point)
        best = _best_candidate(context.recipe, curve)
        for name in (named for named, _, _ in _scored_candidates(curve) if named != best):
            run.delete_tensors(name)
        if mark:
            latest = dict(zip(HISTORY_COLUMNS, trainer.history[-1], strict=True))
            context.progress.say(
                f"step {mark}: active {latest['active']:.3f}, KL {latest['distillation']:.4f}, balance "
                f"{latest['balance']:.3f}, held-out perplexity {point['perplexity']:.3f} at {point['active']:.3f} active"
                + (f", {point['mean_perplexity']:.3f} of the gates' mean" if "mean_perplexity" in point else "")
            )
        return False

    with context.progress.stage("training", settings.steps) as advance:
        run_training_loop(
            lambda n: trainer.train_until(n + 1),
            evaluate_gates,
            settings.steps,
            settings.save_every,
            checkpoints=checkpoints,
            advance=advance,
        )
    return curve


def _score_candidate(
    context: ConversionContext, trainer: GateTrainer, name: str, checkpoint: UnitState
) -> dict[str, float]:
    """Keep the structure that the gates have now, and score it on held-out text."""
    structure = from_tensors(
        context.own_run.run_tensor_unit(name, lambda: to_tensors(structure_of(trainer, context.held_out)))
    )
    with apply_structure(context.model, structure, context.sublayers):
        score = score_text(context.model, context.held_out, checkpoint=checkpoint)
    share = active_share(structure, context.sublayers)
    return {"perplexity": score.perplexity, "accuracy": score.accuracy, "active": share}


def _scored_candidates(curve: Sequence[dict[str, float]]) -> list[tuple[str, float, float]]:
    """Every structure that was scored on held-out text: its unit, perplexity and active share."""
    return [
        (f"structure|{kind}{int(point['step'])}", point[f"{kind}perplexity"], point[f"{kind}active"])
        for point in curve
        for kind in ("", _MEAN)
        if f"{kind}perplexity" in point
    ]


def _best_candidate(recipe: ConvertRecipe, curve: Sequence[dict[str, float]]) -> str:
    """The unit of the structure that is best on held-out text among those within the budget; the last where none is."""
    named = _scored_candidates(curve)
    within = [one for one in named if one[2] <= 1.01 * recipe.active]
    if recipe.train.keep == "last":
        return f"structure|{int(curve[-1]['step'])}"
    return min(within, key=lambda one: one[1])[0] if within else named[-1][0]


def evaluate_structure(
    context: ConversionContext, name: str, blocks: PackedBlocks, structure: Structure | None, part: str = "test"
) -> dict[str, Any]:
    """Score one structure (None: the dense model) on one part of the text, once per run.

    Returns:
        Ready for JSON; figures of all blocks with the length of context that they hold for in their names.
    """

    def compute_score() -> dict[str, Any]:
        place = (
            apply_structure(context.model, structure, context.sublayers)
            if structure is not None
            else contextlib.nullcontext()
        )
        with place, context.progress.stage(f"{name} on {part} text", len(blocks)) as advance:
            score = score_text(context.model, blocks, on_rows=advance, checkpoint=context.own_run.unit_state(unit))
        means = {f"perplexity@{length}": score.perplexity, f"next_token_accuracy@{length}": score.accuracy}
        return {**means, "length": length, **score.sums()}

    unit, length = f"score|{part}|{name}", blocks.row_length
    return context.own_run.run_unit(unit, compute_score)


def collect_activity(context: ConversionContext) -> list[LayerActivity]:
    """What all rivals look at: one pass over the text of the statistics, kept in the run's folder."""
    names = [field.name for field in fields(LayerActivity)]

    def compute_activity() -> dict[str, Tensor]:
        checkpoint = context.own_run.unit_state("activity")
        found = measure_activity(
            context.model, context.sublayers, context.statistics_blocks, _cached_clusters(context), checkpoint
        )
        return {f"{n}.{name}": getattr(own, name).cpu() for n, own in enumerate(found) for name in names}

    sums, device = context.own_run.run_tensor_unit("activity", compute_activity), context.model.device
    return [LayerActivity(*(sums[f"{n}.{name}"].to(device) for name in names)) for n in range(len(context.sublayers))]


GATHERED = ("clusters", "activity")
"""Units whose tensors all rivals look at."""


def best_variant(context: ConversionContext, method: str) -> tuple[Structure, dict[str, float]]:
    """A rival with the attention whole and with the attention pruned like the rest: the better on held-out text."""
    routers, activity = _cached_clusters(context), collect_activity(context)
    found = []
    for attention in (1.0, context.recipe.active):
        structure = make_baseline(method, context.sublayers, activity, routers, context.recipe.active, attention)
        score = evaluate_structure(
            context, f"{method}, attention {attention:g}", context.held_out, structure, "held-out"
        )
        found.append((score[f"perplexity@{score['length']}"], attention, structure))
    _, attention, structure = min(found, key=lambda entry: entry[0])
    share = active_share(structure, context.sublayers)
    return structure, {"attention": attention, "active": share}
