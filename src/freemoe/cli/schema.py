"""`freemoe schema`."""

from __future__ import annotations

import json

import typer

from freemoe.cli.common import out

HELP = """Print the JSON schema of what a run writes into result.json.

Examples:

\b
  freemoe schema
  freemoe schema converted
"""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("schema", help=HELP)
    def command(
        kind: str = typer.Argument(None, help="Kind of artefact (freemoe ls systems); all if absent."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Accepted everywhere; schema only ever prints."),
        as_json: bool = typer.Option(False, "--json", help="Accepted everywhere; schema is JSON."),
    ) -> None:
        from freemoe.systems import SYSTEMS

        kinds = SYSTEMS.names() if kind is None else [kind]
        found = {name: SYSTEMS.get(name).result.model_json_schema() for name in kinds}
        out.print_json(json.dumps(found if kind is None else found[kind]))
