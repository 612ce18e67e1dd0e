"""The command `freemoe`. Each command is a file: parse -> recipe -> one public function."""

from __future__ import annotations

import contextlib
import sys
from typing import NoReturn

import typer

from freemoe.cli import (
    bench,
    demo,
    generate,
    inspect,
    listing,
    lm_eval,
    merge,
    push,
    report,
    run,
    schema,
    serve,
)
from freemoe.cli.failures import STOPPED, close_unheard, require_text, tell_error
from freemoe.cli.options import GroupedCommand
from freemoe.core.errors import RecipeError
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
for command in run.COMMANDS.values():
    command.register_command(app)
app.command("lm-eval", help=lm_eval.HELP, cls=GroupedCommand, context_settings=lm_eval.SETTINGS)(lm_eval.run_command)
for name, module in {
    "generate": generate,
    "merge": merge,
    "push": push,
    "inspect": inspect,
    "report": report,
    "demo": demo,
    "bench": bench,
    "serve": serve,
    "ls": listing,
    "schema": schema,
    "run": run,
}.items():
    app.command(name, help=module.HELP, cls=GroupedCommand, hidden=module is schema)(module.run_command)
for registered in app.registered_commands:
    # Else the overview cuts it.
    registered.short_help = " ".join((registered.help or "").split("\n\n")[0].split())


@app.callback(invoke_without_command=True)
def _print_version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(f"freemoe {__version__}")
        raise typer.Exit


_REPRODUCE = "The papers' tables stand beside the package: in a clone, python -m reproduce (docs/reproduce.md)."


def main() -> None:
    """Run the command `freemoe` and exit with its status."""
    run_program(app, "freemoe")


def run_program(program: typer.Typer, name: str) -> NoReturn:
    """Entry point of a command line: whatever goes wrong ends in a message and never in a traceback.

    Exit codes: 0; 1 where a benchmark missed a target or a row failed; 2 for what was refused; 70 for a fault of freemoe, whose
    traceback is written to a file; 130 for ctrl-C; 141 where nobody reads what is printed.
    """
    for stream in (sys.stdout, sys.stderr):
        # Where a terminal knows ASCII alone, a dash is no reason to fail.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(_run_arguments(sys.argv[1:], program, name))


def _run_arguments(arguments: list[str], program: typer.Typer = app, name: str = "freemoe") -> int:
    """Run a command line; how it ended."""
    try:
        keep_memory_low()
        require_text(arguments)
        if program is app and arguments[:1] == ["reproduce"]:
            raise RecipeError(_REPRODUCE)
        code = program(arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        return STOPPED
    except BrokenPipeError:
        return close_unheard()
    except SystemExit as stop:
        # What typer and rich make of a pipe that nobody reads.
        if isinstance(stop.__context__, BrokenPipeError):
            return close_unheard()
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        return tell_error(error, arguments)
    return code if isinstance(code, int) else 0
