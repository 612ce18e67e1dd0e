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
    push,
    report,
    reproduce,
    run,
    schema,
    trim,
)
from freemoe.cli.failures import STOPPED, is_usage, tell_error, tell_usage
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
    # Help is as wide as the terminal or COLUMNS, up to this.
    context_settings={"max_content_width": 140},
)
for command in (build.COMMAND, convert.COMMAND, trim.COMMAND, evaluate.COMMAND):
    command.register(app)
for module in (lm_eval, generate, merge, push, inspect, report, demo, listing, schema, bench, reproduce, run):
    module.register(app)
for registered in app.registered_commands:
    # Else the overview cuts it.
    registered.short_help = " ".join((registered.help or "").split("\n\n")[0].split())


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(f"freemoe {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: errors made on purpose are printed as a message, without a traceback; exit code 2, of ctrl-C 130."""
    keep_memory_low()
    try:
        code = app(prog_name="freemoe", standalone_mode=False)
    except FreeMoEError as error:
        code = tell_error(error, sys.argv[1:])
    except typer.Abort:
        code = STOPPED
    except Exception as error:
        if not is_usage(error):
            raise
        code = tell_usage(error, sys.argv[1:])
    sys.exit(code if isinstance(code, int) else 0)
