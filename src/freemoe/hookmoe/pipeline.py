"""`trim`: from a recipe to a leaner mixture.

Text -> full model's answers -> plan -> hooks -> training -> artefact -> test: Sec. 3.3-3.4 of HookMoE, each in its own room;
this file only puts them in order. The train part gives gradients, the held-out part settles plan, widths and the step that
is kept, the test part is measured once, at the end.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freemoe.core.run.execute import RunOutput, is_finished, open_run, publish_run
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.progress import Progress, default_progress
from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.distributed.executors import require_place
from freemoe.evals.guessing import text_against_guessing, vocabulary_of
from freemoe.evals.held_out import keep_text_record
from freemoe.evals.keywords import resolve_recipe
from freemoe.evals.speed import compare_prompts, prompt_lengths
from freemoe.evals.text_score import TextScore
from freemoe.evals.verdict import perplexity_against
from freemoe.hookmoe.adapter import Trimmed, save_adapter
from freemoe.hookmoe.artefact import inspect_artefact
from freemoe.hookmoe.card import SIMPLE, model_card
from freemoe.hookmoe.hooks.closed_form import fit_scale_bias, ridge_start
from freemoe.hookmoe.hooks.hook import HookSet, new_hooks
from freemoe.hookmoe.hooks.teacher import TeacherLogits, compute_teacher_logits
from freemoe.hookmoe.hooks.training import TrainingData, TrainingSchedule, train_compensation
from freemoe.hookmoe.material import TextParts, input_digests, prepare_trim
from freemoe.hookmoe.measure import (
    act_equivalent,
    act_per_layer,
    count_parameters,
    load_cv,
    measure_quality,
    quality_as_json,
    record_routes,
    recovered_share,
    route_agreement,
)
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.compare import compare_plans
from freemoe.hookmoe.plans.elsewhere import parallel_measure
from freemoe.hookmoe.plans.exports import write_exports
from freemoe.hookmoe.plans.layers import expert_counts, moe_layers, plan_of
from freemoe.hookmoe.plans.methods import PlanResult, describe_rules, find_plan, hook_widths, kl_drop, rules_asked
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.hookmoe.recipe import HookTraining, TrimRecipe
from freemoe.hookmoe.result import TrimResult
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.identity import IDENTITY, identify_base
from freemoe.models.hooks import combined_hooks
from freemoe.models.spec import family_of
from freemoe.text.blocks import PackedBlocks, row_texts


def trim(
    recipe: TrimRecipe | None = None,
    *,
    progress: Progress | None = None,
    overwrite: bool = False,
    resume: bool = True,
    page: Callable[[Path], Any] | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> Path:
    """Plan, hook, train and write a leaner mixture.

    Instead of a recipe its fields can be given by keywords, a section as a mapping or its fields by their own names; ``model`` may
    then be a loaded model, and data may be in memory: it is written beside the run, as ``OUTPUT.data/NAME.jsonl``.

    Example:
        trim(model="./my-mixture", text="notes.jsonl", act=1.5, output="leaner")

    Args:
        recipe: What to do.
        progress: Where to report.
        overwrite: Replace a finished artefact of the same name.
        resume: Go on with an unfinished run of the same recipe.
        page: Draws a page into the folder that it is given, before that appears (`freemoe.hookmoe.report.write_pages`).
        tokenizer: Of a loaded model; the one beside its files if absent.
        fields: In place of the recipe.

    Returns:
        The artefact's folder.

    Raises:
        FreeMoEError: Its child that says what is wrong; no folder named like the output is left half written.
    """
    with resolve_recipe(TrimRecipe, recipe, fields, tokenizer, overwrite) as recipe:
        if resume and is_finished(recipe):
            return Path(recipe.output)
        with open_run(recipe, overwrite=overwrite, resume=resume) as run:
            output = _run_trim(recipe, run, progress or default_progress())
            return publish_run(run, TrimResult, recipe, output, inspect_artefact, model_card, page)


@dataclass(frozen=True, eq=False)
class TrimContext:
    """What every step of a trim works on: its recipe, the base, its text, and the run that remembers."""

    recipe: TrimRecipe
    model: Any
    tokenizer: Any
    text: TextParts
    run: RunFolder
    progress: Progress

    def teacher_logits(self, blocks: PackedBlocks, part: str) -> TeacherLogits:
        """What the full model says on a part of the text, kept in the run folder."""
        name, state = f"full model, {part}", self.run.unit_state(f"teacher|{part}")
        return compute_teacher_logits(self.model, blocks, self.recipe.training.top, self.progress, name, state)


def _run_trim(recipe: TrimRecipe, run: RunFolder, progress: Progress) -> RunOutput:
    require_place(recipe)
    context = TrimContext(recipe, *prepare_trim(recipe), run, progress)
    model, text, training = context.model, context.text, recipe.training
    base_print, settings = fingerprint_model(model), identify_base(model, context.tokenizer)
    run.require_same_inputs(input_digests(base_print, settings, text))
    base = plan_of(model)
    held_out_teacher = context.teacher_logits(text.held_out, "held-out")
    drops = {
        rule: kl_drop(model, text.held_out, held_out_teacher, run, rule)
        for rule in rules_asked(model, recipe.plan.rescale)
    }
    with parallel_measure(recipe, run, progress) as ahead:
        found = find_plan(model, recipe.plan, drops, progress, recipe.seed, ahead)
    widths, residual = hook_widths(model, recipe.hooks, found, drops[found.rescale])
    progress.say(
        f"plan {found.plan.to_text()} (Act {found.plan.act:.3f} of {base.act:.3f}); router weights {found.rescale}; "
        f"hooks {widths or 'none'}"
    )
    hooks, control, losses, start = None, None, {}, {}
    if widths:
        train_teacher = context.teacher_logits(text.train, "train")
        material = TrainingData(text.train, train_teacher, text.held_out, held_out_teacher)
        hidden = moe_layers(model)[0].hidden
        train = functools.partial(train_compensation, model, run=run, progress=progress)
        hooks, start = _initial_hooks(context, found, widths, material, drops[found.rescale](found.plan))
        losses["hooks"] = train(found.plan, hooks, material, schedule_of(recipe, hidden), rescale=found.rescale)
        if training.control:
            # At full k the teacher has nothing to teach the control: it learns the text instead, as `lm` hooks could.
            control = make_hooks(model, recipe, widths)
            losses["control"] = train(base, control, material, schedule_of(recipe, hidden, "lm"), name="control")

    trimmed = Trimmed(found.plan, hooks, found.rescale).as_type(model.dtype)
    save_adapter(trimmed, model, run.partial)
    write_exports(run.partial, model, found.plan, bool(widths), found.rescale)
    test = _measure_test_rows(context, trimmed, control)
    compared = _compare_other_plans(context) if recipe.plan.compare else []
    guessing = text_against_guessing(math.exp(min(700.0, test["rows"]["full"]["ce"])), vocabulary_of(model))
    return RunOutput(
        base_fingerprint=base_print,
        result={
            **({"guessing": guessing} if guessing else {}),
            "base": _base_facts(recipe, model, base_print, base),
            "plan": {"text": found.plan.to_text(), "act": found.plan.act, "top_k": list(found.plan.ks), **found.record},
            "rescale": describe_rules(drops, found),
            "hooks": {"widths": widths, "residual_kl": residual, "losses": losses, "start": start},
            "cost_of_a_token": _parameter_costs(model, base, trimmed),
            "test": test,
            **_compare_speed(context, trimmed),
            "compared": compared,
            "text": {
                "passages": text.passages,
                "blocks": [len(part) for part in (text.train, text.held_out, text.test)],
            },
        },
        manifest={IDENTITY: settings, "plan": list(found.plan.ks)},
        seen=keep_text_record(run.partial, context.tokenizer, (text.train, text.held_out), text.test, text.questions),
        reported=row_texts(context.tokenizer, text.test),
    )


def _base_facts(recipe: TrimRecipe, model: Any, base_print: str, plan: LayerPlan) -> dict[str, Any]:
    return {
        "name": recipe.model,
        "fingerprint": base_print,
        "family": family_of(model).name,
        "plan": plan.to_text(),
        "act": plan.act,
        "experts": expert_counts(model),
    }


def make_hooks(model: Any, recipe: TrimRecipe, widths: dict[int, int]) -> HookSet:
    """Fresh hooks, with which the model is as it is without."""
    return new_hooks(model, widths, recipe.hooks.scope, recipe.hooks.position, recipe.hooks.bias, recipe.seed)


def _initial_hooks(
    context: TrimContext, result: PlanResult, widths: dict[int, int], material: TrainingData, plan_alone: float
) -> tuple[HookSet, dict[str, Any]]:
    """Hooks as training begins with them: in closed form where that is asked for and better than none, on held-out text.

    Beside them what was measured: held-out KL of both starts, and which one was kept.
    """
    model, recipe, run = context.model, context.recipe, context.run
    hooks = make_hooks(model, recipe, widths)
    if recipe.hooks.start_method == "zero":
        return hooks, {"kept": "zero"}
    ridge_start(model, result.plan, hooks, material.train, result.rescale, run.unit_state("ridge"))
    with apply_plan(model, result.plan, result.rescale), hooks.attached(model):
        state = run.unit_state("ridge, held-out")
        ridge = measure_quality(model, material.held_out, material.held_out_teacher, state).mean_kl
    kept = "ridge" if ridge <= plan_alone else "zero"
    start = {"kept": kept, "held_out_kl": {"zero": plan_alone, "ridge": ridge}}
    return (hooks if kept == "ridge" else make_hooks(model, recipe, widths)), start


def schedule_of(recipe: TrimRecipe, hidden: int, loss: str | None = None) -> TrainingSchedule:
    """The schedule that a recipe says.

    Without a rate, Adam's steps shrink with the width of the residual stream as the hooks' weights do: 3e-3 was best at
    h = 96 (docs/hookmoe.md), and at h = 4096 this comes near the paper's 1e-4.
    """
    training = recipe.training
    rate = training.rate or (0.3 if recipe.hooks.position == "parallel" else 0.1) / hidden
    return TrainingSchedule(
        loss or training.loss, training.steps, training.rows, rate, training.every, recipe.seed, training.checkpointing
    )


def _parameter_costs(model: Any, base: LayerPlan, trimmed: Trimmed) -> dict[str, Any]:
    found: dict[str, Any] = {
        "full": vars(count_parameters(model, base)),
        "trimmed": vars(count_parameters(model, trimmed.plan, trimmed.hooks)),
    }
    if trimmed.hooks is not None:
        found["hooks_as_act"] = act_equivalent(model, trimmed.hooks)
    return found


def _compare_other_plans(context: TrimContext) -> list[dict[str, Any]]:
    """Other ways of running fewer experts, under the router's own rule unless one is asked for; who compares, chooses: no test text."""
    recipe, text = context.recipe, context.text
    return compare_plans(
        context.model,
        text.held_out,
        recipe.plan.compare,
        calibration=text.train,
        rescale="none" if recipe.plan.rescale == "auto" else recipe.plan.rescale,
        top=recipe.training.top,
        run=context.run,
        progress=context.progress,
    )


def _compare_speed(context: TrimContext, trimmed: Trimmed) -> dict[str, Any]:
    """The base and the artefact in turns, both by transformers' own code: what differs is the trim."""
    model, test, timing = context.model, context.text.test, context.recipe.timing

    @contextmanager
    def trimmed_model() -> Iterator[Any]:
        with trimmed.attached(model):
            yield model

    sides = {"full": lambda: contextlib.nullcontext(model), "trimmed": trimmed_model}
    lengths = prompt_lengths(timing, model, test.row_length)
    return compare_prompts(timing, sides, test.ids.flatten().to(model.device), lengths, context.run)


def rows_of(model: Any, trimmed: Trimmed) -> dict[str, AbstractContextManager[Any]]:
    """What every look compares: the base, the plan alone, the plan under the artefact's rule for router weights, its hooks."""
    rows: dict[str, AbstractContextManager[Any]] = {
        "full": contextlib.nullcontext(),
        "plan": apply_plan(model, trimmed.plan),
    }
    if trimmed.rescale != "none":
        rows["rescaled"] = apply_plan(model, trimmed.plan, trimmed.rescale)
    if trimmed.hooks is not None:
        rows["hooks"] = trimmed.attached(model)
    return rows


def _measure_test_rows(context: TrimContext, trimmed: Trimmed, control: HookSet | None) -> dict[str, Any]:
    """The test part under every row of the report; nothing is chosen any more."""
    model, recipe, text, run = context.model, context.recipe, context.text, context.run
    plan, rescale = trimmed.plan, trimmed.rescale
    some = text.train.select_rows(range(min(len(text.train), 64)))
    fit = fit_scale_bias(model, plan, some, rescale, run.unit_state("scale and bias"))
    rows = rows_of(model, trimmed)
    hooks = rows.pop("hooks", None)
    rows["scale and bias"] = combined_hooks(apply_plan(model, plan, rescale), fit.attached(model))
    if hooks is not None:
        rows["hooks"] = hooks
    if control is not None:
        rows["control"] = control.attached(model)
    return measure_rows(model, text, rows, recipe.training, recipe.seed, context.progress, run.unit_state("test"))


def measure_rows(
    model: Any,
    text: TextParts,
    rows: dict[str, AbstractContextManager[Any]],
    training: HookTraining,
    seed: int,
    progress: Progress,
    checkpoint: UnitState = NO_CHECKPOINT,
) -> dict[str, Any]:
    """Cross-entropy, KL, share won back, routes: of every row, on the test part; ``full`` and ``plan`` come first.

    What was measured is kept between two batches.
    """
    teacher = compute_teacher_logits(
        model, text.test, training.top, progress, "full model, test", checkpoint.part_state("teacher")
    )
    counts = {layer.number: layer.count for layer in moe_layers(model)}
    measured: dict[str, TextScore] = {}
    report: dict[str, Any] = {}
    full_routes = record_routes(model, text.test, checkpoint.part_state("full, routes"))
    with progress.stage("test", len(rows)) as advance:
        for name, context in rows.items():
            with context:
                measured[name] = measure_quality(model, text.test, teacher, checkpoint.part_state(name))
                own = record_routes(model, text.test, checkpoint.part_state(f"{name}, routes"))
            report[name] = {
                **quality_as_json(measured[name]),
                "act": act_per_layer(own, counts),
                "load_cv": load_cv(own, counts),
                "route_agreement": route_agreement(full_routes, own),
            }
            advance(1)
    full, plan, groups = measured["full"], measured["plan"], text.test.group_numbers()

    def won_back(before: Tensor, reduced: Tensor, now: Tensor, start: Tensor | None = None) -> list[float | None]:
        return list(recovered_share(before, reduced, now, seed, start=start, groups=groups).as_json().values())

    for name, quality in measured.items():
        if name != "full":
            sums = (part.tolist() for part in (quality.ce, full.ce, full.tokens))
            report[name]["ratio"] = perplexity_against(*sums, groups=groups)
        if name not in ("full", "plan"):
            # The control runs at full k: its gain counts from the full model.
            start = full.ce if name == "control" else None
            report[name]["recovered_ce"] = won_back(full.ce, plan.ce, quality.ce, start)
            if name != "control":
                report[name]["recovered_kl"] = won_back(torch.zeros_like(full.kl), plan.kl, quality.kl)
    if "hooks" in measured:
        starts = {name: measured[name].ce for name in SIMPLE if name in measured}
        if "control" in starts:
            starts["control"] = plan.ce - full.ce + starts["control"]
        report["hooks"]["beyond"] = {n: won_back(full.ce, plan.ce, measured["hooks"].ce, s) for n, s in starts.items()}
    return {"tokens": int(full.tokens.sum()), "groups": len(set(groups)), "rows": report}
