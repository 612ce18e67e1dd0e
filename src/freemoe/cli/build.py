"""`freemoe build`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from freemoe.cli.common import (
    SHARED_PATHS,
    Bars,
    apply_sets,
    calm_libraries,
    numbers,
    out,
    print_json,
    print_outlook,
    print_recipe,
    read_domains,
    say,
    set_flags,
    set_path,
    stopped,
)
from freemoe.core.errors import RecipeError
from freemoe.recipes import BuildRecipe, recipe_from

HELP = """Find, prove and write the domain experts of a base model.

Example, with questions of your own ({"question", "choices", "answer"} or {"prompt", "target"} per line):

\b
  freemoe build ./my-model --domain law=law.jsonl --domain notes=text:notes.txt -o experts

Example, with benchmarks from local files:

\b
  freemoe build ./my-model --domain math=gsm8k,mathqa --domain general=mmlu --data-root ./data --limit 200 -o experts

A smaller model: a fifth of the MLP's neurons off, and the curve on the way there:

\b
  freemoe build ./my-model --domain wiki=text:wiki.txt --unit neuron --off 0.1,0.2 -o experts

The papers' protocol (MoDE Table 3, 5 % bands over their range):

\b
  freemoe build ./my-model --domain math=gsm8k --metric wanda --ratio 0.05 --theta 0:0.5:0.05 \\
    --search exhaustive --select argmax
"""

# Flag -> where its value stands in the recipe.
PATHS = {
    **SHARED_PATHS,
    "by": "subdomains.by",
    "min_size": "subdomains.min_size",
    "metric": "search.metrics",
    "p": "bands.p",
    "ratio": "bands.ratio",
    "scope": "bands.scope",
    "sublayers": "bands.sublayers",
    "patch": "bands.patch",
    "search": "search.method",
    "objective": "search.objective",
    "select": "search.select",
    "alpha": "search.alpha",
    "purify": "saliency.method",
    "step": "saliency.step",
    "budget": "saliency.budget",
    "patience": "saliency.patience",
    "unit": "units.unit",
    "off": "units.off",
    "level2": "router.level2",
    "controls": "evidence.controls",
    "oracle": "evidence.oracle",
    "revision": "revision",
}


def recipe_from_flags(model: str, domains: list[str], flags: dict[str, Any], sets: list[str]) -> BuildRecipe:
    """The recipe that a command line says; flags that were not given keep the recipe's defaults."""
    data: dict[str, Any] = {"command": "build", "model": model, "domains": read_domains(domains)}
    set_flags(data, PATHS, flags)
    if flags.get("subdomains") is not None:
        set_path(data, "subdomains.count", _counts(flags["subdomains"]))
    if flags.get("theta") is not None:
        start, end, step = numbers(flags["theta"], "--theta", 3)
        for key, value in (("start", start), ("end", end), ("step", step)):
            set_path(data, f"bands.{key}", value)
    if flags.get("even") is not None:
        set_path(data, "units.layout", "even" if flags["even"] else "free")
    if flags.get("layers") is not None:
        set_path(data, "bands.layers", numbers(flags["layers"], "--layers", 2, int))
    apply_sets(data, sets)
    recipe = recipe_from(data, "The command line")
    assert isinstance(recipe, BuildRecipe)
    return recipe


def _counts(text: str) -> int | dict[str, int]:
    """Read ``8`` or ``math=8,code=3``."""
    try:
        if "=" not in text:
            return int(text)
        return {name.strip(): int(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise RecipeError(f"--subdomains is {text!r}; write a number, or one per domain: math=8,code=3") from None


def run_recipe(recipe: BuildRecipe, *, overwrite: bool, resume: bool, as_json: bool, quiet: bool) -> Path:
    """Run a build, write its report, print what was found."""
    calm_libraries()
    from freemoe.core.runs import interrupted
    from freemoe.domain_experts.build import build
    from freemoe.domain_experts.prove.card import headlines
    from freemoe.report.html import write_report
    from freemoe.report.tables import summary_table

    try:
        folder = build(recipe, progress=Bars(quiet or as_json), overwrite=overwrite, resume=resume)
        report = write_report(folder)
    except KeyboardInterrupt:
        raise stopped(interrupted(recipe.output)) from None
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if as_json:
        print_json({"folder": str(folder), "report": str(report), "headlines": headlines(result), "result": result})
        return folder
    out.print(summary_table(result))
    for line in headlines(result):
        say(line)
    say(f"artefact: {folder}\nreport:   {report}")
    return folder


def print_plan(recipe: BuildRecipe, as_json: bool) -> None:
    """Print what a build would do: units of work, memory, time."""
    calm_libraries()
    from freemoe.domain_experts.dry_run import plan

    found = plan(recipe)
    print_outlook(found, as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("build", help=HELP)
    def command(
        model: str = typer.Argument(help="Folder or hub id of the base model, or freemoe-demo."),
        domain: list[str] = typer.Option([], "--domain", "-d", help="NAME=TASK[,TASK]; repeat. See freemoe ls tasks."),
        output: str = typer.Option(None, "--output", "-o", help="Folder to write. [freemoe-out]"),
        data_root: str = typer.Option(None, help="Folder with the benchmarks' original files; the hub if absent."),
        limit: int = typer.Option(None, help="Documents per task and split."),
        fewshot: int = typer.Option(None, help="Few-shot examples; each task's own number if absent."),
        overflow: str = typer.Option(None, help="Prompts beyond the context: truncate or error. [truncate]"),
        allow_code_execution: bool = typer.Option(
            None, "--allow-code-execution", help="Run generated code, sandboxed."
        ),
        by: str = typer.Option(None, help="Subdomains by kmeans, task, field or none. [kmeans]"),
        subdomains: str = typer.Option(None, help="Clusters: a number, or math=8,code=3. [1 per 40 documents]"),
        min_size: int = typer.Option(None, help="Smaller subdomains are merged. [8]"),
        metric: str = typer.Option(None, help="saliency, wanda, magnitude, random; comma-separated. [saliency,wanda]"),
        p: str = typer.Option(None, help="Norm of the inputs: 1, 2, 4 or inf (MoDE Table 2). [2]"),
        ratio: float = typer.Option(None, help="Width of a band (MoDE Table 3). [0.1]"),
        theta: str = typer.Option(None, help="Bands from START:END:STEP, ascending importance. [0:1:0.1]"),
        scope: str = typer.Option(None, help="Ranking per row (MoDE) or layer (Free-MoE). [row]"),
        sublayers: str = typer.Option(None, help="attention, mlp or both (MoDE Table 4). [both]"),
        layers: str = typer.Option(None, help="Decoder layers FIRST:LAST (last not included). [all]"),
        patch: int = typer.Option(None, help="Side of the patches: 1, 2, 4, 16 (MoDE Table 5). [1]"),
        search: str = typer.Option(None, help="exhaustive or halving. [halving]"),
        objective: str = typer.Option(None, help="accuracy or loglikelihood. [accuracy]"),
        select: str = typer.Option(None, help="guarded, or argmax as in the papers. [guarded]"),
        alpha: float = typer.Option(None, help="Level of the guard over all subdomains. [0.05]"),
        purify: str = typer.Option(
            None, help="Signed purification: greedy, learned, both or auto (learned for text). [auto]"
        ),
        step: float = typer.Option(None, help="Greedy purification of tasks: share switched off per round. [5e-5]"),
        budget: float = typer.Option(None, help="Signed purification: largest share off. [0.01]"),
        patience: int = typer.Option(None, help="Signed purification: failed rounds before it ends. [8]"),
        unit: str = typer.Option(None, help="Switch whole units off: neuron, kv_group, layer or expert. [none]"),
        off: str = typer.Option(None, help="Share of the units off; several for the curve: 0.1,0.2,0.3. [0.2]"),
        even: bool = typer.Option(None, "--even/--free", help="As many units off in every layer, or freely. [even]"),
        level2: str = typer.Option(None, help="Router's second level: linear or centroid. [linear]"),
        controls: int = typer.Option(None, help="Random masks per expert in the report. [3]"),
        oracle: bool = typer.Option(None, "--oracle/--no-oracle", help="Also score every candidate on the test split."),
        seed: int = typer.Option(None, help="Seed of everything random. [0]"),
        dtype: str = typer.Option(None, help="auto, float32, bfloat16 or float16. [auto]"),
        device: str = typer.Option(None, help="auto, cpu, cuda, cuda:N. [auto]"),
        threads: int = typer.Option(None, help="CPU threads."),
        batch_tokens: int = typer.Option(None, help="Padded tokens per batch. [4096]"),
        revision: str = typer.Option(None, help="Revision of the hub repository."),
        sets: list[str] = typer.Option([], "--set", help="Any recipe field: PATH=VALUE, e.g. search.folds=5; repeat."),
        resume: bool = typer.Option(True, help="Go on with an unfinished run of the same recipe."),
        overwrite: bool = typer.Option(False, "--overwrite", help="Replace a finished output."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print units of work, memory and time; do nothing."),
        print_recipe_: bool = typer.Option(False, "--print-recipe", help="Print the YAML for freemoe run; do nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
        quiet: bool = typer.Option(False, "--quiet", "-q", help="No bars."),
    ) -> None:
        recipe = recipe_from_flags(model, domain, locals(), sets)
        if print_recipe_:
            print_recipe(recipe)
        elif dry_run:
            print_plan(recipe, as_json)
        else:
            run_recipe(recipe, overwrite=overwrite, resume=resume, as_json=as_json, quiet=quiet)
