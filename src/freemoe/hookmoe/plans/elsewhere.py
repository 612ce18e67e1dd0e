"""Plans that workers measure side by side, each a unit of work: the search finds them in its journal."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from freemoe.core.run.ahead import ParallelStages
from freemoe.core.run.folder import RunFolder, RunPart
from freemoe.core.run.places import executor_spec_of
from freemoe.core.run.progress import Progress, QuietProgress
from freemoe.distributed.executors import executor_of
from freemoe.hookmoe.hooks.teacher import TeacherLogits, compute_teacher_logits
from freemoe.hookmoe.material import TextParts, input_digests, prepare_trim
from freemoe.hookmoe.plans.layers import read_plan
from freemoe.hookmoe.plans.methods import Measure, drop_unit, kl_drop
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.identity import identify_base
from freemoe.recipes import recipe_from

_STAGE = "drop"


@contextmanager
def parallel_measure(recipe: TrimRecipe, run: RunFolder, progress: Progress) -> Iterator[Measure | None]:
    """What measures many plans side by side where the recipe says so; None where it does not."""
    if not executor_spec_of(recipe).is_parallel:
        yield None
        return
    known = {"recipe": recipe.model_dump(mode="json")}
    work = f"{__name__}:{work_ahead.__name__}"
    with ParallelStages(run, executor_of(recipe), work, known, lambda *unit: False) as ahead:

        def measure_plans(candidates: Sequence[tuple[str, LayerPlan]]) -> None:
            new = dict.fromkeys(drop_unit(rule, plan) for rule, plan in candidates)
            names = [name.removeprefix(f"{_STAGE}|") for name in new if name not in run.journal]
            with progress.stage("plans elsewhere", len(names)) as advance:
                ahead.run_stage(_STAGE, names, lambda name: advance(1))

        yield measure_plans


def work_ahead(recipe: dict[str, Any], output: str, stage: str, name: str) -> None:
    """Measure a plan for a trim that another process makes, and leave it in its run folder.

    ``name``: rule for router weights and plan, ``RULE|PLAN``.
    """
    model, text, teacher = _begun_once(json.dumps(recipe), output)
    rule, _, spelled = name.partition("|")
    plan = read_plan(spelled, model)
    kl_drop(model, text.held_out, teacher, RunPart(output, f"{stage}|{name}"), rule)(plan)


@functools.lru_cache(maxsize=1)
def _begun_once(recipe: str, output: str) -> tuple[Any, TextParts, TeacherLogits]:
    """Base, text and the full model's answers of this process, made once."""
    read = recipe_from(json.loads(recipe))
    assert isinstance(read, TrimRecipe)
    model, tokenizer, text = prepare_trim(read)
    RunPart(output, "begun").require_same_inputs(
        input_digests(fingerprint_model(model), identify_base(model, tokenizer), text)
    )
    return (
        model,
        text,
        compute_teacher_logits(model, text.held_out, read.training.top, QuietProgress(), "full model, held-out"),
    )
