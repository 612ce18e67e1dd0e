"""`freemoe run`."""

from __future__ import annotations

from typing import Annotated

import typer

from freemoe.cli import build, convert, evaluate, options, trim
from freemoe.cli.common import CommandOutput, apply_sets, print_recipe
from freemoe.recipes import load_recipe, recipe_from

COMMANDS = {module.COMMAND.name: module.COMMAND for module in (build, convert, trim, evaluate)}
HELP = """Run a recipe: the YAML that --print-recipe prints, or that stands in an artefact as recipe.yaml.

Example:

\b
  freemoe build ./my-model --domain law=law.jsonl -o experts --print-recipe > recipe.yaml
  freemoe run recipe.yaml
"""


def run_command(
    recipe: str = typer.Argument(help="YAML file."),
    output: str = typer.Option(None, "--output", "-o", help="Write here instead of the recipe's output."),
    sets: list[str] = typer.Option([], "--set", help="Change a field: PATH=VALUE, e.g. data.limit=64; repeat."),
    resume: options.Resume = True,
    overwrite: options.Overwrite = False,
    dry_run: Annotated[bool, options.dry_run_option("Print units of work, memory and time; do nothing.")] = False,
    print_recipe_: options.PrintRecipe = False,
    summary: options.Summary = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run ``freemoe run`` with these options."""
    loaded = load_recipe(recipe)
    if output is not None or sets:
        data = loaded.model_dump(mode="json")
        apply_sets(data, sets)
        data["output"] = data["output"] if output is None else output
        loaded = recipe_from(data, f"{recipe} with --set")
    if print_recipe_:
        print_recipe(loaded, as_json)
    elif dry_run:
        COMMANDS[loaded.command].print_plan(loaded, as_json)
    else:
        shown = CommandOutput(as_json, summary, quiet)
        COMMANDS[loaded.command].execute_recipe(loaded, overwrite=overwrite, resume=resume, shown=shown)
