from __future__ import annotations

from typing import Any

import typer

from freemoe.cli import build, convert, evaluate, trim
from freemoe.cli.common import apply_sets
from freemoe.cli.flags import RecipeCommand, run_options, system_command, with_signature
from freemoe.recipes import load_recipe, recipe_from
from freemoe.systems import SYSTEMS

_OWN = {module.COMMAND.name: module.COMMAND for module in (build, convert, trim)}
COMMANDS: dict[str, RecipeCommand] = {
    **{s.command: _OWN.get(s.command) or system_command(s) for s in map(SYSTEMS.get, SYSTEMS)},
    evaluate.COMMAND.name: evaluate.COMMAND,
}
"""Every command that runs a recipe: of each system, and the evaluation."""

HELP = """Run a recipe: the YAML that --print-recipe prints, or that stands in an artefact as recipe.yaml.

Example:

\b
  freemoe build ./my-model --domain law=law.jsonl -o experts --print-recipe > recipe.yaml
  freemoe run recipe.yaml
"""


@with_signature(
    {
        "recipe": (str, typer.Argument(help="YAML file.")),
        "output": (str, typer.Option(None, "--output", "-o", help="Write here instead of the recipe's output.")),
        "sets": (list[str], typer.Option([], "--set", help="Change a field: PATH=VALUE, e.g. data.limit=64; repeat.")),
        **run_options("units of work, memory and time"),
    }
)
def run_command(recipe: str, output: str | None, sets: list[str], **values: Any) -> None:
    """Run ``freemoe run`` with these options."""
    loaded = load_recipe(recipe)
    if output is not None or sets:
        data = loaded.model_dump(mode="json")
        apply_sets(data, sets)
        data["output"] = data["output"] if output is None else output
        loaded = recipe_from(data, f"{recipe} with --set")
    COMMANDS[loaded.command].execute_recipe(loaded, values)
