"""How a command ends that could not do what it was asked: a line on standard error, with --json a document too, and the code."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from freemoe.cli.common import Stopped
from freemoe.cli.documents import print_json
from freemoe.core import neutral
from freemoe.core.environment import package_versions
from freemoe.core.errors import ArtifactError, DataError, FreeMoEError, RecipeError
from freemoe.core.files import cache_folder
from freemoe.core.untrusted import text_fault

REFUSED, FAULT, STOPPED, UNHEARD = 2, 70, 130, 141
"""Exit codes: what was refused, a fault of freemoe itself, ctrl-C, and a reader that closed the pipe."""

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")

_LONGEST = 20_000
"""Characters of a message."""

_NO_PATH = ("Symlink loop", "Could not determine home directory", "embedded null")
"""What pathlib says, not as an error of the system, of a name that leads nowhere."""


def tell_error(error: Exception, arguments: list[str]) -> int:
    """Print why a command did not do what it was asked; returns the exit code."""
    if hasattr(error, "format_message") and hasattr(error, "show"):
        # A command line that could not be parsed; typer's class for it has had several homes.
        return _tell_usage(error, arguments)
    known = error if isinstance(error, FreeMoEError) else _to_freemoe_error(error)
    if known is None:
        said, code = _describe_fault(error, arguments), FAULT
    else:
        said, code = str(known), STOPPED if isinstance(known, Stopped) else REFUSED
    if len(said) > _LONGEST:
        said = f"{said[:_LONGEST]} ... ({len(said):,} characters)"
    with contextlib.suppress(OSError):
        print(neutral.escape_terminal(said if code == STOPPED else f"error: {said}"), file=sys.stderr)
    _print_error_json(said, type(known or error).__name__, code, arguments)
    return code


def _tell_usage(error: Any, arguments: list[str]) -> int:
    """Print what could not be parsed, with the usage and near misses; returns the exit code."""
    near = getattr(error, "possibilities", None)
    if near:
        error.message += f". Did you mean {' or '.join(repr(n) for n in sorted(near))}?"
        error.possibilities = None
    error.message = neutral.escape_terminal(error.message)
    error.show()
    _print_error_json(error.format_message(), "UsageError", error.exit_code, arguments)
    return error.exit_code


def require_text(arguments: list[str]) -> None:
    """Raise for an argument that is no text: bytes that are not UTF-8 arrive as characters that nothing can write down."""
    for number, argument in enumerate(arguments, start=1):
        if text_fault(argument):
            raise RecipeError(
                f"Argument {number}, {argument!r:.80}, is not UTF-8. Write it, or name the file, in UTF-8."
            )


def _to_freemoe_error(error: Exception) -> FreeMoEError | None:
    """The error of ours that says what the system said: a file or folder that it refuses, no memory left; else None."""
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        name = "" if error.filename is None else f"'{neutral.one_line(error.filename, 200)}': "
        why = error.strerror or str(error)
        return ArtifactError(f"{name}{why}. Check that it is there, its name, and who may read and write it.")
    if isinstance(error, RuntimeError | ValueError) and any(words in str(error) for words in _NO_PATH):
        return DataError(f"{neutral.one_line(error, 300)}. Check the names of files and folders.")
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)
    ):
        return DataError(
            "There is not enough memory for this. --dry-run says what build and convert need; a smaller base, --dtype bfloat16, "
            "--device disk or smaller batches (--batch-tokens) need less."
        )
    return None


def _describe_fault(error: Exception, arguments: list[str]) -> str:
    """Say that freemoe itself failed, where the traceback was written and where to report it."""
    first = (str(error).strip().splitlines() or [""])[0]
    what = neutral.one_line(f"{type(error).__name__}: {first}" if first else type(error).__name__, 300)
    kept = _write_traceback(error, arguments)
    where = f"The traceback stands in {kept}" if kept else "The traceback could not be written"
    return (
        f"this is a fault of freemoe, not of yours ({what}). {where}. Please report it with that file, once you have "
        f"looked at what it says of your data, {report_page()}."
    )


def report_page() -> str:
    """Where faults are reported, in words: the page that the installed package names."""
    pages = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.metadata("freemoe").get_all("Project-URL") or []:
            label, _, page = line.partition(",")
            pages[label.strip().lower()] = page.strip()
    for label in ("bug reports", "bug tracker", "issues", "tracker", "repository", "source", "homepage"):
        if label in pages:
            return f"at {pages[label]}"
    return "to those that you have freemoe from"


def _write_traceback(error: Exception, arguments: list[str]) -> Path | None:
    """Write all that a report needs to a file that only its owner reads; None where no folder takes it."""
    packages = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    head = f"freemoe {' '.join(arguments)}\n{packages}\nPython {platform.python_version()}, {platform.platform()}\n\n"
    text = head + "".join(traceback.format_exception(error))
    name = f"fault-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (cache_folder, lambda: Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, RuntimeError):
            folder().mkdir(parents=True, exist_ok=True)
            path = folder() / name
            with os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600), "wb"
            ) as out:
                out.write(text.encode("utf-8", "backslashreplace"))
            return path
    return None


def close_unheard() -> int:
    """What was printed found no reader (``freemoe ... | head``): print no more, also not at the end; returns the exit code."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNHEARD


def _print_error_json(message: str, kind: str, code: int, arguments: list[str]) -> None:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in own:
        print_json("error", {"error": message, "kind": kind, "exit_code": code})
