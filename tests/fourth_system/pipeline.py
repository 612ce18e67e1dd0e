"""The pipeline of the toy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from freemoe.core.run.execute import RunOutput, open_run, publish_run
from freemoe.core.run.progress import Progress
from freemoe.evals.held_out import keep_record
from freemoe.evals.seen import SeenHashes
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.loading import load_base
from tests.fourth_system.artefact import inspect_artefact
from tests.fourth_system.recipe import DampRecipe
from tests.fourth_system.result import DampResult


def damp(
    recipe: DampRecipe,
    *,
    progress: Progress,
    overwrite: bool = False,
    resume: bool = True,
    page: Callable[[Path], Any] | None = None,
) -> Path:
    with open_run(recipe, overwrite=overwrite, resume=resume) as run:
        model, _ = load_base(recipe.model, recipe.revision, recipe.dtype)
        output = RunOutput(
            base_fingerprint=fingerprint_model(model),
            result={"factor": recipe.factor},
            manifest={"factor": recipe.factor},
            seen=keep_record(run.partial, SeenHashes.from_texts([])),
        )
        return publish_run(run, DampResult, recipe, output, inspect_artefact, lambda result: "# Damped\n", page)


def plan_damp(recipe: DampRecipe) -> dict[str, Any]:
    return {"output": recipe.output}
