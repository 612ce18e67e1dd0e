"""`freemoe demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from freemoe.cli import options
from freemoe.cli.common import CommandOutput, print_recipe

HELP = """Build experts for the bundled tiny model on the bundled benchmark: everything freemoe does, in minutes.

The tiny base was trained on conflicting sources ON PURPOSE, so that there is something to switch off in the domain
code, and nothing in the domain general. It shows the machinery, not that large models hold noise weights.

Example:

\b
  freemoe demo -o demo-out
"""


def run_command(
    output: str = typer.Option("demo-out", "--output", "-o", help="Folder to write."),
    seed: int = typer.Option(0, help="Seed of splits, masks and draws."),
    limit: int = typer.Option(None, help="Documents per task and split; all if absent."),
    threads: options.Threads = None,
    workers: int = typer.Option(None, min=1, help="Processes that work side by side; the same bytes. [1]"),
    resume: options.Resume = True,
    overwrite: options.Overwrite = False,
    dry_run: Annotated[bool, options.dry_run_option("Print units of work, memory and time; do nothing.")] = False,
    print_recipe_: options.PrintRecipe = False,
    summary: options.Summary = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run ``freemoe demo`` with these options."""
    from freemoe.cli.build import COMMAND
    from freemoe.core.ledger import keep_none
    from freemoe.domain_experts.demo import demo_recipe

    keep_none()
    recipe = demo_recipe(output, seed=seed, limit=limit, threads=threads, workers=workers)
    if print_recipe_:
        print_recipe(recipe, as_json)
    elif dry_run:
        COMMAND.print_plan(recipe, as_json)
    else:
        COMMAND.execute_recipe(recipe, overwrite=overwrite, resume=resume, shown=CommandOutput(as_json, summary, quiet))
