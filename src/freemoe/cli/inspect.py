"""`freemoe inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from freemoe.cli.common import calm_libraries, out, print_json, say

HELP = """Show what an artefact holds, and check that it is whole; with --base, that it fits that base.

Example:

\b
  freemoe inspect experts
  freemoe inspect experts --base ./my-model
"""


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        if isinstance(value, list):
            out.print(f"{key}:", markup=False)
            for item in value:
                line = "  " + "  ".join(f"{k}={v}" for k, v in item.items())
                say(line)
        else:
            say(f"{key}: {value}")


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("inspect", help=HELP)
    def command(
        artefact: Path = typer.Argument(help="Folder written by freemoe build, a model folder, or a GGUF."),
        base: str = typer.Option(None, help="Base model to check the fingerprint against."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Accepted everywhere; inspect only ever reads."),
        as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
    ) -> None:
        calm_libraries()
        from freemoe.domain_experts.inspection import inspect_artefact, inspect_model
        from freemoe.families.gguf_header import is_gguf
        from freemoe.families.loading import BUNDLED, BUNDLED_MOE
        from freemoe.hookmoe.inspection import inspect_trimmed, is_trimmed
        from freemoe.tomoe.inspection import inspect_converted, is_converted

        if is_converted(artefact):
            found = inspect_converted(artefact, base)
        elif is_trimmed(artefact):
            found = inspect_trimmed(artefact, base)
        elif is_gguf(artefact) or (artefact / "config.json").is_file() or str(artefact) in (BUNDLED, BUNDLED_MOE):
            found = inspect_model(str(artefact))
        else:
            found = inspect_artefact(artefact, base)
        _show(found, as_json)
