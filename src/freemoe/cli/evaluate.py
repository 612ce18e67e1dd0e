"""`freemoe eval`."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from freemoe.cli.common import (
    SHARED_PATHS,
    Bars,
    apply_sets,
    calm_libraries,
    out,
    print_json,
    print_recipe,
    read_domains,
    set_flags,
    stopped,
)
from freemoe.recipes import EvalRecipe, recipe_from

HELP = """Score an artefact's experts, or a plain model, on the reported split of tasks.

Example:

\b
  freemoe eval experts --domain math=gsm8k --data-root ./data --expert base --expert auto
  freemoe eval ./my-model --domain law=law.jsonl

A trimmed mixture (see trim) is measured against its base and its plan alone; without a domain, on its own text's test part:

\b
  freemoe eval trimmed --domain math=demo:math
"""

PATHS = {"base": "base", **SHARED_PATHS}


def print_plan(recipe: EvalRecipe, as_json: bool) -> None:
    """Print how many documents would be scored."""
    calm_libraries()
    from freemoe.domain_experts.workbench import load_domains
    from freemoe.evals.held_out import read_record, seeded, set_aside
    from freemoe.models.checkpoints.loading import load_tokenizer

    source = recipe.base or _base_name(recipe.artefact)
    record = read_record(recipe.artefact)
    loaded = load_domains(seeded(recipe, record), load_tokenizer(source))
    domains = {name: set_aside(data, record)[0] for name, data in loaded.items()}
    plan = {n: f"{len(d.reported)} documents x {len(recipe.experts)} experts" for n, d in domains.items()}
    if as_json:
        print_json(plan)
    for name, line in {} if as_json else plan.items():
        out.print(f"{name}: {line}", markup=False, highlight=False)


def run_recipe(recipe: EvalRecipe, *, overwrite: bool, resume: bool, as_json: bool, quiet: bool) -> None:
    """Score, print a table; there is nothing that could be resumed."""
    del resume
    calm_libraries()
    from freemoe.domain_experts.prove.card import gain_text
    from freemoe.domain_experts.prove.evaluation import evaluate
    from freemoe.hookmoe.artefact_files import is_trimmed

    if is_trimmed(recipe.artefact):
        _run_trimmed(recipe, overwrite, as_json, quiet)
        return
    try:
        result = evaluate(recipe, progress=Bars(quiet or as_json), overwrite=overwrite)
    except KeyboardInterrupt:
        raise stopped("Stopped; nothing was written. Run the same command to start again.") from None
    if as_json:
        print_json(result)
        return
    table = Table("domain", "expert", "score", "difference to the base [95 %]", "documents", "set aside", box=None)
    for domain in result["domains"]:
        aside = str(domain["set_aside"]["documents"])
        for expert, row in domain["rows"].items():
            gain = "" if expert == "base" else gain_text(row, domain["unit"])
            table.add_row(domain["name"], expert, f"{row['score']:.2f}", gain, str(row["documents"]), aside)
    out.print(table)


def _run_trimmed(recipe: EvalRecipe, overwrite: bool, as_json: bool, quiet: bool) -> None:
    """Tasks under a trimmed mixture."""
    from freemoe.hookmoe.evaluation import evaluate

    result = evaluate(recipe, progress=Bars(quiet or as_json), overwrite=overwrite)
    if as_json:
        print_json(result)
        return
    table = Table("domain", "", "score", "difference to the base [95 %]", "documents", "set aside", box=None)
    for domain in result["domains"]:
        aside = str(domain["set_aside"]["documents"])
        for name, row in domain["rows"].items():
            mean, low, high = row["difference"]
            digits = 2 if row["unit"] == "points" else 4
            gain = "" if name == "full" else f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
            table.add_row(domain["name"], name, f"{row['score']:.{digits}f}", gain, str(row["documents"]), aside)
    out.print(table)


def _run_trimmed_text(artefact: str, base: str | None, flags: dict[str, Any]) -> None:
    """A trimmed mixture on its own text."""
    calm_libraries()
    from freemoe.hookmoe.evaluation import evaluate_text
    from freemoe.report.tables import trimmed_table

    bars = Bars(flags["quiet"] or flags["as_json"])
    found = evaluate_text(artefact, base, flags["dtype"] or "auto", flags["device"] or "auto", flags["threads"], bars)
    if flags["as_json"]:
        print_json(found)
    else:
        out.print(trimmed_table(found))


def _base_name(artefact: str) -> str:
    from pathlib import Path

    from freemoe.core.artifacts import MANIFEST, read_manifest

    if (Path(artefact) / MANIFEST).is_file():
        return read_manifest(artefact)["base_model_name_or_path"]
    return artefact


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("eval", help=HELP)
    def command(
        artefact: str = typer.Argument(help="Folder written by freemoe build, or a plain model."),
        domain: list[str] = typer.Option([], "--domain", "-d", help="NAME=TASK[,TASK]; repeat."),
        expert: list[str] = typer.Option([], "--expert", "-e", help="base, auto, or a name; repeat. [base, auto]"),
        base: str = typer.Option(None, help="Base model; the artefact's own if absent."),
        output: str = typer.Option(None, "--output", "-o", help="Also write the result as JSON here."),
        data_root: str = typer.Option(None, help="Folder with the benchmarks' original files; the hub if absent."),
        limit: int = typer.Option(None, help="Documents per task."),
        fewshot: int = typer.Option(None, help="Few-shot examples; each task's own number if absent."),
        overflow: str = typer.Option(None, help="Prompts beyond the context: truncate or error. [truncate]"),
        allow_code_execution: bool = typer.Option(
            None, "--allow-code-execution", help="Run generated code, sandboxed."
        ),
        seed: int = typer.Option(None, help="Carves tasks without a split of their own; the artefact's own if absent."),
        dtype: str = typer.Option(None, help="auto, float32, bfloat16 or float16. [auto]"),
        device: str = typer.Option(None, help="auto, cpu, cuda, cuda:N. [auto]"),
        threads: int = typer.Option(None, help="CPU threads."),
        batch_tokens: int = typer.Option(None, help="Padded tokens per batch. [4096]"),
        sets: list[str] = typer.Option([], "--set", help="Any recipe field: PATH=VALUE; repeat."),
        overwrite: bool = typer.Option(False, "--overwrite", help="Replace the output file."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print units of work; score nothing."),
        print_recipe_: bool = typer.Option(False, "--print-recipe", help="Print the YAML for freemoe run; do nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
        quiet: bool = typer.Option(False, "--quiet", "-q", help="No bars."),
    ) -> None:
        flags = locals()
        from freemoe.hookmoe.artefact_files import is_trimmed

        if not domain and not dry_run and not print_recipe_ and is_trimmed(artefact):
            _run_trimmed_text(artefact, base, flags)
            return
        data: dict[str, Any] = {"command": "eval", "artefact": artefact, "domains": read_domains(domain)}
        if expert:
            data["experts"] = tuple(expert)
        set_flags(data, PATHS, flags)
        apply_sets(data, sets)
        recipe = recipe_from(data, "The command line")
        assert isinstance(recipe, EvalRecipe)
        if print_recipe_:
            print_recipe(recipe)
        elif dry_run:
            print_plan(recipe, as_json)
        else:
            run_recipe(recipe, overwrite=overwrite, resume=False, as_json=as_json, quiet=quiet)
