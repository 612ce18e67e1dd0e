"""The pipeline of the toy."""

from freemoe.core.run.execute import RunOutput, open_run, publish_run
from freemoe.evals.held_out import keep_record
from freemoe.evals.seen import SeenHashes
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.loading import load_base
from tests.fourth_system.artefact import inspect_artefact
from tests.fourth_system.result import DampResult


def damp(recipe, *, progress, overwrite=False, resume=True, page=None):
    with open_run(recipe, overwrite=overwrite, resume=resume) as run:
        model, _ = load_base(recipe.model, recipe.revision, recipe.dtype)
        output = RunOutput(
            base_fingerprint=fingerprint_model(model),
            result={"factor": recipe.factor},
            manifest={"factor": recipe.factor},
            seen=keep_record(run.partial, SeenHashes.from_texts([])),
        )
        return publish_run(run, DampResult, recipe, output, inspect_artefact, lambda result: "# Damped\n", page)


def plan_damp(recipe):
    return {"output": recipe.output}
