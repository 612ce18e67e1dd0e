"""`freemoe convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

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
    stopped,
)
from freemoe.recipes import ConvertRecipe, recipe_from

HELP = """Make a dense model a token-level mixture of experts: the base's own weights, frozen, a part of them per token.

Example, half of the weights per token, on a text of your own:

\b
  freemoe convert ./my-model --text corpus.txt --active 0.5 -o half
  freemoe eval half --domain notes=text:notes.txt

The papers' mix of instructions, code and encyclopedia, from local files:

\b
  freemoe convert ./my-model --mix paper --data-root ./data --active 0.6 --experts 8 --profile paper -o sixty

A rival without training, written as the same kind of model:

\b
  freemoe convert ./my-model --text corpus.txt --method static-activation -o static
"""

# Flag -> where its value stands in the recipe.
PATHS = {
    "revision": "revision",
    "mix": "mix",
    "data_root": "data_root",
    "output": "output",
    "active": "active",
    "experts": "experts",
    "method": "method",
    "profile": "profile",
    "mode": "mode",
    "rivals": "rivals",
    "steps": "train.steps",
    "block": "train.block",
    "batch_tokens": "train.batch_tokens",
    "rate": "train.rate",
    "checkpointing": "train.checkpointing",
    "seed": "seed",
    "dtype": "dtype",
    "device": "device",
    "threads": "threads",
}


def run_recipe(recipe: ConvertRecipe, *, overwrite: bool, resume: bool, as_json: bool, quiet: bool) -> Path:
    """Convert, write the report, print what was found."""
    calm_libraries()
    from freemoe.core.runs import interrupted
    from freemoe.report.conversion import write_conversion_report
    from freemoe.tomoe.card import headlines, rows
    from freemoe.tomoe.convert import convert
    from freemoe.tomoe.devices import Devices

    try:
        folder = convert(recipe, progress=Bars(quiet or as_json), overwrite=overwrite, resume=resume)
        if Devices.found().rank:
            return folder  # the first of several processes writes and prints
        report = write_conversion_report(folder)
    except KeyboardInterrupt:
        raise stopped(interrupted(recipe.output)) from None
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if as_json:
        print_json({"folder": str(folder), "report": str(report), "headlines": headlines(result), "result": result})
        return folder
    length = result["blocks"]["length"]
    table = Table("on test text", "active", f"perplexity@{length}", "next-token accuracy", box=None)
    for name, active, perplexity, accuracy in rows(result):
        table.add_row(name, f"{active:.1%}", f"{perplexity:.3f}", f"{accuracy:.2%}")
    out.print(table)
    say(headlines(result)[-1])
    say(f"model:  {folder}\nreport: {report}")
    return folder


def print_plan(recipe: ConvertRecipe, as_json: bool) -> None:
    """Print what a conversion would do."""
    calm_libraries()
    from freemoe.tomoe.dry_run import plan

    found = plan(recipe)
    print_outlook(found, as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("convert", help=HELP)
    def command(
        model: str = typer.Argument(help="Folder or hub id of a dense model, or freemoe-demo."),
        text: list[str] = typer.Option([], "--text", help="Text to learn from: .txt, .jsonl, .json; repeat."),
        mix: str = typer.Option(None, help="A mix of data sets under --data-root: paper."),
        data_root: str = typer.Option(None, help="Folder with the data sets; the hub if absent."),
        output: str = typer.Option(None, "--output", "-o", help="Folder to write. [freemoe-converted]"),
        active: float = typer.Option(None, help="Share of the decoder's weights that a token uses. [0.5]"),
        experts: int = typer.Option(None, help="Experts of every MLP, 2 or more. [8]"),
        method: str = typer.Option(
            None, help="tomoe, or a rival: static-magnitude, static-activation, activation-split. [tomoe]"
        ),
        profile: str = typer.Option(None, help="default, paper or authors. [default]"),
        mode: str = typer.Option(None, help="How it is written: shared, materialised or pseudo. [shared]"),
        rivals: bool = typer.Option(None, "--rivals/--no-rivals", help="Also measure the rivals. [rivals]"),
        steps: int = typer.Option(None, help="Training steps; the profile's if absent."),
        block: int = typer.Option(None, help="Tokens of a block. [2048, or the model's context]"),
        batch_tokens: int = typer.Option(None, help="Tokens per step. [4096]"),
        rate: float = typer.Option(None, help="Learning rate. [1e-3]"),
        checkpointing: bool = typer.Option(None, "--checkpointing", help="Less memory, about a third slower."),
        seed: int = typer.Option(None, help="Seed of everything random. [0]"),
        dtype: str = typer.Option(None, help="auto, float32, bfloat16 or float16. [auto]"),
        device: str = typer.Option(None, help="auto, cpu, cuda, cuda:N. [auto]"),
        threads: int = typer.Option(None, help="CPU threads."),
        revision: str = typer.Option(None, help="Revision of the hub repository."),
        sets: list[str] = typer.Option(
            [], "--set", help="Any recipe field: PATH=VALUE, e.g. gates.noise=true; repeat."
        ),
        resume: bool = typer.Option(True, help="Go on with an unfinished run of the same recipe."),
        overwrite: bool = typer.Option(False, "--overwrite", help="Replace a finished output."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print tokens, steps and parameters; do nothing."),
        print_recipe_: bool = typer.Option(False, "--print-recipe", help="Print the YAML for freemoe run; do nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
        quiet: bool = typer.Option(False, "--quiet", "-q", help="No bars."),
    ) -> None:
        data: dict[str, Any] = {"command": "convert", "model": model, "text": tuple(text)}
        set_flags(data, PATHS, locals())
        apply_sets(data, sets)
        recipe = recipe_from(data, "The command line")
        assert isinstance(recipe, ConvertRecipe)
        if print_recipe_:
            print_recipe(recipe)
        elif dry_run:
            print_plan(recipe, as_json)
        else:
            run_recipe(recipe, overwrite=overwrite, resume=resume, as_json=as_json, quiet=quiet)
