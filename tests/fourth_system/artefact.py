"""The artefact of the toy: the manifest says all that there is."""

from contextlib import contextmanager, nullcontext
from pathlib import Path

from freemoe.core.artifacts import describe_artefact, read_manifest
from freemoe.evals.engine.answering import Answering
from freemoe.evals.evaluation import EvalTarget, make_variant
from freemoe.hub.fetch import HubAccess
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.hooks import forward_hook


@contextmanager
def damped(model, factor):
    with forward_hook(model.model.layers[-1].mlp, lambda module, inputs, output: output * factor):
        yield


def load_artefact(folder, base, dtype, device, access):
    manifest = read_manifest(folder)
    model, tokenizer = load_base(base or manifest["base_model_name_or_path"], manifest["revision"], dtype, device)
    ways = {"damped": lambda: damped(model, manifest["factor"]), "base": nullcontext}
    return Answering(model, tokenizer, ways, folder)


def eval_target(recipe):
    opened = load_artefact(Path(recipe.artefact), recipe.base, recipe.dtype, recipe.device, HubAccess())
    return EvalTarget(
        opened.model, opened.tokenizer, {name: make_variant(way) for name, way in reversed(opened.ways.items())}
    )


def inspect_artefact(folder, base=None):
    manifest = read_manifest(folder)
    return {**describe_artefact(folder, manifest, base), "factor": manifest["factor"]}
