"""What ran, said from the recipes that ran: the protocol under a table, and what the paper's own scale takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.tomoe.recipe import ConvertRecipe
from reproduce.runs import Run, run_of
from reproduce.table import Row, Scene, Table

NEEDS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))


def name_of(run: Run, row: Row) -> str:
    """What ran in the place of the paper's model; of one task, its domain."""
    if isinstance(run.recipe, BuildRecipe) and len(run.recipe.domains) == 1:
        _, space, metric = row.of.partition(" ")
        return next(iter(run.recipe.domains)) + space + metric
    return Path(run.recipe.model).name


def facts_of(run: Run, found: Mapping[str, Any]) -> dict[str, str]:
    """What ran, by what it is about; ``found``: its record, empty where there is none yet."""
    recipe = run.recipe
    facts = {"model": recipe.model, "profile": recipe.profile}
    if isinstance(recipe, BuildRecipe):
        domains = [(name, ", ".join(tasks), found.get(name, {})) for name, tasks in recipe.domains.items()]
        facts["tasks"] = "; ".join(_task_text(name, specs, domain) for name, specs, domain in domains)
        facts["bands"] = f"{len(recipe.bands.band_edges())} of {recipe.bands.ratio:.0%}"
        facts["selection"] = "reference split, reported on test; oracle: on test, as the paper's"
        return facts
    scored = found.get("tasks") or next(iter(found.values()), {}).get("tasks", {}) if found else {}
    if isinstance(recipe, ConvertRecipe):
        facts["text"] = (recipe.mix and f"mix {recipe.mix}") or ", ".join(Path(text).name for text in recipe.text)
        tokens = recipe.train.steps * recipe.train.batch_tokens
        facts["training"] = f"{recipe.train.steps:,} steps, {tokens:,} tokens ({recipe.train.loss})"
    if isinstance(recipe, TrimRecipe):
        facts["text"] = Path(recipe.text).name
        training, hooks = recipe.training, recipe.hooks
        facts["plan"] = recipe.plan.given or recipe.plan.search
        facts["hooks"] = f"{hooks.layers}, units {hooks.units or 'by default'}, rate {training.rate or 'by default'}"
        if recipe.hooks.layers != "none":
            tokens = training.steps * training.rows * training.block
            facts["training"] = (
                f"{training.limit:,} blocks of {training.block:,}, {training.steps:,} steps, {tokens:,} tokens ({training.loss})"
            )
        facts["test text"] = f"{training.test:,} blocks of {training.block:,}"
    specs = {name: spec if isinstance(spec, str) else ", ".join(spec) for name, spec in run.arguments["tasks"].items()}
    tasks = [_task_text(name, spec, next(iter(scored.get(name, {}).values()), {})) for name, spec in specs.items()]
    return facts | ({"tasks": "; ".join(tasks)} if tasks else {})


def _task_text(name: str, specs: str, scored: Mapping[str, Any]) -> str:
    parts = [f"{name} by {specs}"] + ([scored["metric"]] if "metric" in scored else [])
    parts += [f"{scored['documents']:,} documents"] if "documents" in scored else []
    return ", ".join(parts + ([f"K {len(scored['subdomains'])}"] if "subdomains" in scored else []))


def protocol_line(facts: Sequence[Mapping[str, str]]) -> str:
    """The facts of a table's runs, each once: ``model: a / b. profile: paper. ...``; empty for no run."""
    names = dict.fromkeys(name for one in facts for name in one)
    values = {name: dict.fromkeys(one[name] for one in facts if one.get(name)) for name in names}
    return ". ".join(f"{name}: {' / '.join(each)}" for name, each in values.items() if each)


def needs_line(table: Table, scene: Scene) -> str:
    """What the paper's own scale takes: memory for each model that runs, and hours for the runs, each counted once."""
    runs = {run.key: run for run in (run_of(row, table, scene) for row in table.runs)}
    models = dict.fromkeys(run.recipe.model for run in runs.values())
    weights = {model: [1e9 * number for number in NEEDS["weights"].get(model, [0])] for model in models}
    # Weights in bfloat16, and a fifth more for activations and work.
    memory = [f"{model}, about {2.4e-9 * own[0]:.0f} GB" if own[0] else model for model, own in weights.items()]
    flops = sum(2 * weights[run.recipe.model][-1] * _tokens(run) for run in runs.values())
    texts = [str(getattr(run.recipe, "text", "") or "") for run in runs.values()]
    data = sorted({text for text in texts if text.endswith(".jsonl")})
    code = any(getattr(getattr(run.recipe, "data", None), "samples", None) for run in runs.values())
    more = [f"{', '.join(data)} in this folder"] if data else []
    more += ["programs that the model writes are run (--allow-code-execution)"] if code else []
    hours = f"{flops / 1e14 / 3600:.1f} hours for {len(runs)} runs at 100 useful TFLOP/s"
    return "; ".join([f"accelerator memory in bfloat16 for {', '.join(memory)}", hours, *more])


def _tokens(run: Run) -> float:
    """Tokens that go forward through the model, about; a trained one counts as three."""
    recipe, arguments = run.recipe, run.arguments
    if isinstance(recipe, BuildRecipe):
        tasks = [task for tasks in recipe.domains.values() for task in tasks]
        return sum(math.prod(NEEDS["documents"].get(t, [0])) for t in tasks) * (1 + len(recipe.bands.band_edges()))
    # The full model, what was made of it, and of a trim the plan alone.
    ways = 1 + len(arguments["plans"]) if "plans" in arguments else 2 if isinstance(recipe, ConvertRecipe) else 3
    tokens = NEEDS["tasks"] * ways if arguments["tasks"] else 0.0
    if isinstance(recipe, ConvertRecipe):
        return tokens + 4 * recipe.train.steps * recipe.train.batch_tokens
    if isinstance(recipe, TrimRecipe) and recipe.hooks.layers != "none":
        return tokens + 4 * recipe.training.steps * recipe.training.rows * recipe.training.block
    return tokens
