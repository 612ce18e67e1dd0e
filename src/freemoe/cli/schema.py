from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from freemoe.cli import completion, options
from freemoe.core.registry import unknown_name

HELP = """Print the JSON schema of what a run writes into result.json, and of what a command prints with --json.

Examples:

\b
  freemoe schema converted
  freemoe schema build
  freemoe schema
"""


def run_command(
    kind: str = typer.Argument(
        None,
        help="Kind of artefact (freemoe ls systems), or a document: its command, -plan for a dry run; all if absent.",
        autocompletion=completion.complete_names(completion.schema_names),
    ),
    dry_run: Annotated[bool, options.dry_run_option("Accepted everywhere; schema only ever prints.")] = False,
    as_json: bool = typer.Option(False, "--json", help="Accepted everywhere; schema is JSON."),
) -> None:
    """Run ``freemoe schema`` with these options."""
    from freemoe.cli.schemas import DOCUMENTS
    from freemoe.systems import SYSTEMS

    known = {**{name: SYSTEMS.get(name).result_type for name in SYSTEMS}, **DOCUMENTS}
    # A document's own name, as its field "schema" has it, works too.
    asked = None if kind is None else kind.removeprefix("freemoe.").partition("/")[0]
    if asked is not None and asked not in known:
        raise unknown_name("kind", asked, list(known))
    found = {name: known[name].model_json_schema() for name in ([asked] if asked else known)}
    sys.stdout.write(json.dumps(found[asked] if asked else found, indent=1, ensure_ascii=False) + "\n")
