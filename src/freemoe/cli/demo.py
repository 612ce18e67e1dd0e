"""`freemoe demo`."""

from __future__ import annotations

import typer

from freemoe.cli.common import print_recipe

HELP = """Build experts for the bundled tiny model on the bundled benchmark: everything freemoe does, in minutes.

The tiny base was trained on conflicting sources ON PURPOSE, so that there is something to switch off in the domain
code, and nothing in the domain general. It shows the machinery, not that large models hold noise weights.

Example:

\b
  freemoe demo -o demo-out
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("demo", help=HELP)
    def command(
        output: str = typer.Option("demo-out", "--output", "-o", help="Folder to write."),
        seed: int = typer.Option(0, help="Seed of splits, masks and bootstrap."),
        limit: int = typer.Option(None, help="Documents per task and split; all if absent."),
        threads: int = typer.Option(None, help="CPU threads."),
        resume: bool = typer.Option(True, help="Go on with an unfinished demo."),
        overwrite: bool = typer.Option(True, help="Replace an earlier demo."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print units of work, memory and time; do nothing."),
        print_recipe_: bool = typer.Option(False, "--print-recipe", help="Print the YAML for freemoe run; do nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
        quiet: bool = typer.Option(False, "--quiet", "-q", help="No bars."),
    ) -> None:
        from freemoe.cli.build import print_plan, run_recipe
        from freemoe.domain_experts.demo import demo_recipe

        recipe = demo_recipe(output, seed=seed, limit=limit, threads=threads)
        if print_recipe_:
            print_recipe(recipe)
        elif dry_run:
            print_plan(recipe, as_json)
        else:
            run_recipe(recipe, overwrite=overwrite, resume=resume, as_json=as_json, quiet=quiet)
