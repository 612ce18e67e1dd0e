"""Plans that workers measure side by side, each a unit of work: the search finds them in its journal."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from freemoe.core.run.ahead import Ahead
from freemoe.core.run.folder import RunFolder, RunPart
from freemoe.core.run.places import place_of
from freemoe.core.run.progress import Progress, Quiet
from freemoe.distributed.executors import executor_of
from freemoe.hookmoe.hooks.teacher import Teacher, teach
from freemoe.hookmoe.material import TextParts, inputs, prepare
from freemoe.hookmoe.plans.apply import expert_counts, plan_of
from freemoe.hookmoe.plans.methods import Measure, drop_unit, kl_drop
from freemoe.hookmoe.plans.plan import Plan, parse_plan
from freemoe.models.checkpoints.fingerprint import fingerprint
from freemoe.models.checkpoints.identity import identity
from freemoe.recipes import TrimRecipe, recipe_from

_STAGE = "drop"


@contextmanager
def measuring(recipe: TrimRecipe, run: RunFolder, progress: Progress) -> Iterator[Measure | None]:
    """What measures many plans side by side where the recipe says so; None where it does not."""
    if not place_of(recipe).several:
        yield None
        return
    known = {"recipe": recipe.model_dump(mode="json")}
    work = f"{__name__}:{work_ahead.__name__}"
    with Ahead(run, executor_of(recipe), work, known, lambda *unit: False) as ahead:

        def measure(asked: Sequence[tuple[str, Plan]]) -> None:
            new = dict.fromkeys(drop_unit(rule, plan) for rule, plan in asked)
            names = [name.removeprefix(f"{_STAGE}|") for name in new if name not in run.journal]
            with progress.stage("plans elsewhere", len(names)) as advance:
                ahead.fill(_STAGE, names, lambda name: advance(1))

        yield measure


def work_ahead(recipe: dict[str, Any], output: str, stage: str, name: str) -> None:
    """Measure a plan for a trim that another process makes, and leave it in its run folder.

    Args:
        recipe: The trim's, as plain data.
        output: Its output.
        stage: What is done.
        name: Rule for router weights and plan, ``RULE|PLAN``.
    """
    model, text, teacher = _begun_once(json.dumps(recipe), output)
    rule, _, spelled = name.partition("|")
    plan = parse_plan(spelled, plan_of(model), expert_counts(model))
    kl_drop(model, text.held_out, teacher, RunPart(output, f"{stage}|{name}"), rule)(plan)


@functools.lru_cache(maxsize=1)
def _begun_once(recipe: str, output: str) -> tuple[Any, TextParts, Teacher]:
    """Base, text and the full model's answers of this process, made once."""
    read = recipe_from(json.loads(recipe))
    assert isinstance(read, TrimRecipe)
    model, tokenizer, text = prepare(read)
    RunPart(output, "begun").same_inputs(inputs(fingerprint(model), identity(model, tokenizer), text))
    return model, text, teach(model, text.held_out, read.training.top, Quiet(), "full model, held-out")
