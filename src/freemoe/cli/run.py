"""`freemoe run`."""

from __future__ import annotations

import typer

from freemoe.cli import build, convert, evaluate, trim
from freemoe.cli.common import CommandOutput, apply_sets, print_recipe
from freemoe.cli.flags import JSON, QUIET, SUMMARY
from freemoe.recipes import load_recipe, recipe_from

COMMANDS = {module.COMMAND.name: module.COMMAND for module in (build, convert, trim, evaluate)}
HELP = """Run a recipe: the YAML that --print-recipe prints, or that stands in an artefact as recipe.yaml.

Example:

\b
  freemoe build ./my-model --domain law=law.jsonl -o experts --print-recipe > recipe.yaml
  freemoe run recipe.yaml
"""


def register_command(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("run", help=HELP)
    def run_command(
        recipe: str = typer.Argument(help="YAML file."),
        output: str = typer.Option(None, "--output", "-o", help="Write here instead of the recipe's output."),
        sets: list[str] = typer.Option([], "--set", help="Change a field: PATH=VALUE, e.g. data.limit=64; repeat."),
        resume: bool = typer.Option(True, help="Go on with an unfinished run of the same recipe."),
        overwrite: bool = typer.Option(False, "--overwrite", help="Replace a finished output."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print units of work, memory and time; do nothing."),
        print_recipe_: bool = typer.Option(False, "--print-recipe", help="Print the recipe with all its defaults."),
        summary: bool = SUMMARY,
        as_json: bool = JSON,
        quiet: bool = QUIET,
    ) -> None:
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
            COMMANDS[loaded.command].run(loaded, overwrite=overwrite, resume=resume, shown=shown)
