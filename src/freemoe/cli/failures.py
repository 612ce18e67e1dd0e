"""How a command ends that could not do what it was asked: a line on standard error, with --json a document too, and the code."""

from __future__ import annotations

import sys
from typing import Any

from freemoe.cli.common import Stopped
from freemoe.cli.documents import print_json
from freemoe.core.errors import FreeMoEError

REFUSED, STOPPED = 2, 130
"""Exit codes of what was refused, and of ctrl-C."""


def tell_error(error: FreeMoEError, arguments: list[str]) -> int:
    """Print an error made on purpose; returns the exit code.

    Args:
        error: What was raised.
        arguments: The command line, for ``--json``.
    """
    stopped = isinstance(error, Stopped)
    print(str(error) if stopped else f"error: {error}", file=sys.stderr)
    code = STOPPED if stopped else REFUSED
    _document(str(error), type(error).__name__, code, arguments)
    return code


def is_usage(error: Exception) -> bool:
    """Whether it is a command line that could not be parsed; typer's class for it has had several homes."""
    return hasattr(error, "format_message") and hasattr(error, "show")


def tell_usage(error: Any, arguments: list[str]) -> int:
    """Print what could not be parsed, with the usage and near misses; returns the exit code."""
    near = getattr(error, "possibilities", None)
    if near:
        error.message += f". Did you mean {' or '.join(repr(n) for n in sorted(near))}?"
        error.possibilities = None
    error.show()
    _document(error.format_message(), "UsageError", error.exit_code, arguments)
    return error.exit_code


def _document(message: str, kind: str, code: int, arguments: list[str]) -> None:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in own:
        print_json("error", {"error": message, "kind": kind, "exit_code": code})
