"""`freemoe trim`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from freemoe.cli.common import (
    Bars,
    apply_sets,
    calm_libraries,
    out,
    print_json,
    print_outlook,
    print_recipe,
    say,
    set_flags,
    set_path,
    stopped,
)
from freemoe.core.errors import RecipeError
from freemoe.recipes import TrimRecipe, recipe_from

HELP = """Run fewer experts of a mixture model, and train small hooks that win back what that costs (HookMoE).

Example, with the bundled tiny mixture:

\b
  freemoe trim freemoe-demo-moe --text demo: --act 1.0 --block 128 --steps 300 -o trimmed

Example, with a model and a text of your own:

\b
  freemoe trim ./my-mixture --text notes.jsonl --act 1.5 -o trimmed

A plan by name (two layers at k = 2, the others at 1), or the paper's search:

\b
  freemoe trim ./my-mixture --text notes.jsonl --plan tlnle:2,2 -o trimmed
  freemoe trim ./my-mixture --text notes.jsonl --search two_stage --hooks one --position pre --loss lm -o trimmed
"""

# Flag -> where its value stands in the recipe.
PATHS = {
    "output": "output",
    "plan": "plan.given",
    "act": "plan.act",
    "search": "plan.search",
    "score": "plan.score",
    "tolerance": "plan.tolerance",
    "rescale": "plan.rescale",
    "units": "hooks.units",
    "scope": "hooks.scope",
    "position": "hooks.position",
    "start": "hooks.start",
    "loss": "training.loss",
    "steps": "training.steps",
    "rate": "training.rate",
    "block": "training.block",
    "limit": "training.limit",
    "control": "training.control",
    "seed": "seed",
    "dtype": "dtype",
    "device": "device",
    "threads": "threads",
    "revision": "revision",
}


def recipe_from_flags(model: str, text: str, flags: dict[str, Any], sets: list[str]) -> TrimRecipe:
    """The recipe that a command line says; flags that were not given keep the recipe's defaults."""
    data: dict[str, Any] = {"command": "trim", "model": model, "text": text}
    set_flags(data, PATHS, flags)
    if flags.get("hooks") is not None:
        set_path(data, "hooks.layers", _layers(flags["hooks"]))
    apply_sets(data, sets)
    recipe = recipe_from(data, "The command line")
    assert isinstance(recipe, TrimRecipe)
    return recipe


def _layers(text: str) -> str | list[int]:
    """Read ``all``, ``one``, ``none`` or ``0,3``."""
    if text in ("all", "one", "none"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"--hooks is {text!r}; write all, one, none, or layer numbers: 0,3") from None


def run_recipe(recipe: TrimRecipe, *, overwrite: bool, resume: bool, as_json: bool, quiet: bool) -> Path:
    """Run a trim, draw its Pareto list, print what was found."""
    calm_libraries()
    from freemoe.core.runs import interrupted
    from freemoe.hookmoe.card import headlines
    from freemoe.hookmoe.trim import trim
    from freemoe.report.figures.plan_figures import write_pareto
    from freemoe.report.tables import trimmed_table
    from freemoe.report.trimmed import write_trimmed_report

    try:
        folder = trim(recipe, progress=Bars(quiet or as_json), overwrite=overwrite, resume=resume)
    except KeyboardInterrupt:
        raise stopped(interrupted(recipe.output)) from None
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    picture, report = write_pareto(result, folder), write_trimmed_report(folder)
    if as_json:
        print_json({"folder": str(folder), "headlines": headlines(result), "result": result})
        return folder
    out.print(trimmed_table(result["test"]))
    for line in headlines(result):
        say(line)
    say(f"artefact: {folder}")
    if picture:
        say(f"plans:    {picture}")
    say(f"report:   {report}")
    return folder


def print_plan(recipe: TrimRecipe, as_json: bool) -> None:
    """Print what a trim would do."""
    calm_libraries()
    from freemoe.hookmoe.dry_run import outlook

    found = outlook(recipe)
    print_outlook(found, as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("trim", help=HELP)
    def command(
        model: str = typer.Argument(help="Folder or hub id of the mixture, or freemoe-demo-moe."),
        text: str = typer.Option(..., "--text", "-t", help="Text file (.txt, .jsonl, .json), or demo: ."),
        output: str = typer.Option(None, "--output", "-o", help="Folder to write. [freemoe-trimmed]"),
        act: float = typer.Option(
            None, help="Most experts per token and layer, averaged: the knapsack finds the plan."
        ),
        plan: str = typer.Option(None, help="uniform:K, tlnle:K,L, expert_n:K,L,R, or one K per layer: 2,2,1,1."),
        search: str = typer.Option(None, help="knapsack, or two_stage as in the paper. [knapsack]"),
        score: str = typer.Option(None, help="Profile by kl (held-out) or perturbation (no data). [kl]"),
        tolerance: float = typer.Option(None, help="Held-out KL in nats that a search without --act allows. [0.05]"),
        rescale: str = typer.Option(
            None, help="Router weights: none (the model's rule), kept_mass, renorm. [the best]"
        ),
        hooks: str = typer.Option(None, help="all reduced layers, one, none, or layer numbers: 0,3. [all]"),
        units: int = typer.Option(None, help="Hidden units of all hooks together. [half of an expert's]"),
        scope: str = typer.Option(None, help="block (paper) or routed. [block]"),
        position: str = typer.Option(None, help="parallel (beside the block) or pre (paper). [parallel]"),
        start: str = typer.Option(None, help="zero, or ridge for parallel hooks. [ridge, or zero]"),
        loss: str = typer.Option(None, help="kd, lm (paper) or state. [kd]"),
        steps: int = typer.Option(None, help="Steps of training. [1000]"),
        rate: float = typer.Option(None, help="Highest learning rate. [0.3 / hidden size; pre: 0.1]"),
        block: int = typer.Option(None, help="Tokens of a block. [512]"),
        limit: int = typer.Option(None, help="Blocks that train at most. [512]"),
        control: bool = typer.Option(None, "--control/--no-control", help="Also train the hooks at full k. [yes]"),
        seed: int = typer.Option(None, help="Seed of everything random. [0]"),
        dtype: str = typer.Option(None, help="auto, float32, bfloat16 or float16. [auto]"),
        device: str = typer.Option(None, help="auto, cpu, cuda, cuda:N. [auto]"),
        threads: int = typer.Option(None, help="CPU threads."),
        revision: str = typer.Option(None, help="Revision of the hub repository."),
        sets: list[str] = typer.Option([], "--set", help="Any recipe field: PATH=VALUE, e.g. plan.best=4; repeat."),
        resume: bool = typer.Option(True, help="Go on with an unfinished run of the same recipe."),
        overwrite: bool = typer.Option(False, "--overwrite", help="Replace a finished output."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print units of work and sizes; train nothing."),
        print_recipe_: bool = typer.Option(False, "--print-recipe", help="Print the YAML for freemoe run; do nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
        quiet: bool = typer.Option(False, "--quiet", "-q", help="No bars."),
    ) -> None:
        recipe = recipe_from_flags(model, text, locals(), sets)
        if print_recipe_:
            print_recipe(recipe)
        elif dry_run:
            print_plan(recipe, as_json)
        else:
            run_recipe(recipe, overwrite=overwrite, resume=resume, as_json=as_json, quiet=quiet)
