"""`freemoe demo`."""

from __future__ import annotations

import typer

from freemoe.cli.common import CommandOutput, print_recipe
from freemoe.cli.flags import JSON, QUIET, SUMMARY

HELP = """Build experts for the bundled tiny model on the bundled benchmark: everything freemoe does, in minutes.

The tiny base was trained on conflicting sources ON PURPOSE, so that there is something to switch off in the domain
code, and nothing in the domain general. It shows the machinery, not that large models hold noise weights.

Example:

\b
  freemoe demo -o demo-out
"""


def register_command(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("demo", help=HELP)
    def demo_command(
        output: str = typer.Option("demo-out", "--output", "-o", help="Folder to write."),
        seed: int = typer.Option(0, help="Seed of splits, masks and draws."),
        limit: int = typer.Option(None, help="Documents per task and split; all if absent."),
        threads: int = typer.Option(None, min=1, help="CPU threads."),
        workers: int = typer.Option(None, min=1, help="Processes that work side by side; the same bytes. [1]"),
        resume: bool = typer.Option(True, help="Go on with an unfinished demo."),
        overwrite: bool = typer.Option(False, "--overwrite", help="Replace an artefact that stands there."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print units of work, memory and time; do nothing."),
        print_recipe_: bool = typer.Option(False, "--print-recipe", help="Print the YAML for freemoe run; do nothing."),
        summary: bool = SUMMARY,
        as_json: bool = JSON,
        quiet: bool = QUIET,
    ) -> None:
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
            COMMAND.run(recipe, overwrite=overwrite, resume=resume, shown=CommandOutput(as_json, summary, quiet))
