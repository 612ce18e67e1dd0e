"""The command `freemoe`. Each command is a file: parse -> recipe -> one public function."""

from __future__ import annotations

import sys

import typer

from freemoe.cli import (
    bench,
    build,
    convert,
    demo,
    evaluate,
    generate,
    inspect,
    listing,
    lm_eval,
    merge,
    report,
    run,
    schema,
    trim,
)
from freemoe.core.errors import FreeMoEError
from freemoe.core.memory import keep_memory_low
from freemoe.core.version import __version__

app = typer.Typer(
    name="freemoe",
    help="Find the experts inside a frozen, pretrained LLM, prove whether they help, ship them in megabytes.",
    epilog="Start with: freemoe demo",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)
for command in (build.COMMAND, convert.COMMAND, trim.COMMAND, evaluate.COMMAND):
    command.register(app)
for module in (lm_eval, generate, merge, inspect, report, demo, listing, schema, bench, run):
    module.register(app)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(f"freemoe {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: errors made on purpose are printed as a message, without a traceback; exit code 2."""
    keep_memory_low()
    try:
        app(prog_name="freemoe")
    except FreeMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
