"""What every command shares: where it prints and how, quiet libraries, reading flags that a recipe cannot."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

from freemoe.cli.documents import lines_of, print_json
from freemoe.core import neutral
from freemoe.core.errors import FreeMoEError, RecipeError
from freemoe.core.run.progress import BarProgress, LineProgress, Progress, QuietProgress
from freemoe.core.untrusted import parse_yaml, read_json
from freemoe.recipes import set_path

if TYPE_CHECKING:
    from rich.table import Table

PIPED = 118
"""Columns of a table that goes to a file or a pipe, where COLUMNS says nothing: not the 80 that nobody looks through."""

DUMB = ("dumb", "unknown")


def make_console(stderr: bool, terminal: bool, environ: Mapping[str, str]) -> Console:
    """A console that heeds COLUMNS, NO_COLOR, FORCE_COLOR, CLICOLOR, CLICOLOR_FORCE and TERM=dumb.

    NO_COLOR wins over what forces colours.
    """
    columns = environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else None
    forced = any(environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    dumb = environ.get("TERM") in DUMB
    plain = dumb or bool(environ.get("NO_COLOR")) or (environ.get("CLICOLOR") == "0" and not forced)
    alive = terminal and not dumb
    made = Console(
        stderr=stderr,
        markup=False,  # names may hold brackets
        width=width if width or alive else PIPED,
        color_system=None if plain else "auto",
        force_terminal=alive or (forced and not plain),
        _environ=environ,
    )
    made.push_render_hook(_EscapeHook())
    return made


class _EscapeHook(RenderHook):
    """Makes what is printed harmless: no name or text in it is obeyed by the terminal (`core.neutral`)."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_EscapedRenderable(renderable) for renderable in renderables]


class _EscapedRenderable:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.renderable, options):
            yield segment if segment.control else Segment(neutral.escape_terminal(segment.text), segment.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.renderable)


console = make_console(True, sys.stderr.isatty(), os.environ)
out = make_console(False, sys.stdout.isatty(), os.environ)


def progress_of(quiet: bool) -> Progress:
    """Where long work reports: bars on a terminal, a line every ten seconds elsewhere, or nowhere."""
    if quiet:
        return QuietProgress()
    # Not what FORCE_COLOR says: it asks for colours in a log, not for moving bars.
    if sys.stderr.isatty() and os.environ.get("TERM") not in DUMB:
        return BarProgress(console)
    return LineProgress(lambda line: print(neutral.escape_terminal(line), file=sys.stderr, flush=True))


@dataclass(frozen=True)
class CommandOutput:
    """How a command says what it does and what it found."""

    as_json: bool = False  # One JSON document on standard output
    # The verdict's lines and where the artefact is; no tables. With ``as_json``, no per-document result.
    summary: bool = False
    quiet: bool = False

    def make_progress(self) -> Progress:
        """Where the work reports; always standard error."""
        return progress_of(self.quiet)

    def print_result(
        self, command: str, folder: Path, headlines: list[str], tables: Callable[[], list[Table]], **more: Path | None
    ) -> None:
        """Print what a run made.

        The tables stand above the headlines, which are the verdict in lines; ``more`` is what else was written, by name.
        """
        from freemoe.report.page import REPORT

        made = {"folder": folder, "report": folder / REPORT, **more}
        result = {"result": plain_result(folder)} if self.as_json and not self.summary else {}
        places = [f"{'artefact' if name == 'folder' else name}: {where}" for name, where in made.items() if where]
        found = {**made, "headlines": headlines, **result}
        self.print_found(command, found, tables, headlines + places, headlines + places[:1])

    def print_found(
        self,
        command: str,
        document: Mapping[str, Any],
        tables: Callable[[], list[Table]],
        lines: list[str],
        summary: list[str],
    ) -> None:
        """Print what a command found as a document, as a summary's lines, or as tables and lines."""
        if self.as_json:
            return print_json(command, document)
        for table in [] if self.summary else tables():
            print_table(table)
        for line in summary if self.summary else lines:
            print_line(line)

    def print_artefact(self, command: str, folder: Path, **more: Path | None) -> None:
        """Print verdict and tables of what a run made, and where they and its page are."""
        from freemoe.core.ledger import openings_text
        from freemoe.results import read_result
        from freemoe.systems import SYSTEMS

        result = read_result(folder)
        tables, lines = SYSTEMS.get(result.kind).part("report:tables")(result)
        lines = [*getattr(result, "notes", ()), *lines, *openings_text(result.cost.openings)]
        self.print_result(command, folder, lines, lambda: tables, **more)


def plain_result(place: Path) -> Any:
    """What stands in a result file, every key of it, for a document."""
    return read_json(place if place.suffix == ".json" and not place.is_dir() else place / "result.json", finite=False)


def calm_libraries() -> None:
    """Keep other libraries' bars, warnings and network calls out of the way; called once per command."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_EscapingFormatter("%(name)s: %(message)s"))
    # What became of a base while it was loaded or fetched, and as what a file was read, belong to the output.
    for room in ("freemoe.models", "freemoe.text", "freemoe.hub"):
        logging.getLogger(room).setLevel(logging.INFO)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # For the workers of a build, which inherit nothing else.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # transformers' reader of GGUF files draws its bar whatever its own switch says.
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.simplefilter("ignore")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


class _EscapingFormatter(logging.Formatter):
    """Log lines whose names and texts a terminal does not obey."""

    def format(self, record: logging.LogRecord) -> str:
        return neutral.escape_terminal(super().format(record))


def print_line(line: str) -> None:
    """Print a line as it is: no markup, no colours, not broken."""
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def print_status(line: str) -> None:
    """The same on standard error, beside what is printed."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table whose words are broken where they do not fit, not cut."""
    for column in table.columns:
        column.overflow = "fold"
    out.print(table)


def print_fields(command: str, fields: dict[str, Any], as_json: bool) -> None:
    """Print what a dry run or a look found: a document, or a line per key, with units."""
    if as_json:
        print_json(command, fields)
        return
    for line in lines_of(fields):
        print_line(line)


def apply_sets(target: dict[str, Any], sets: list[str]) -> None:
    """Apply ``--set section.key=value`` options; values are YAML."""
    for item in sets:
        path, equals, text = item.partition("=")
        if not equals:
            raise RecipeError(f"--set {item!r}: write PATH=VALUE, e.g. --set search.alpha=0.1")
        set_path(target, path.strip(), parse_yaml(text, f"--set {path}: {text!r:.80}", RecipeError))


def read_domains(texts: list[str]) -> dict[str, tuple[str, ...]]:
    """Read the ``--domain NAME=TASK[,TASK]`` options."""
    from freemoe.evals.tasks.domains import parse_domain

    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, tasks = parse_domain(text)
        if name in found:
            raise RecipeError(f"--domain {name!r} is given twice; list its tasks in one: --domain {name}=TASK,TASK")
        found[name] = tasks
    return found


def parse_numbers(text: str, flag: str, count: int, kind: type = float) -> list[Any]:
    """Parse ``a:b:c`` into ``count`` numbers; a `RecipeError` names the flag."""
    try:
        parts = [kind(p) for p in text.split(":")]
    except ValueError:
        parts = []
    if len(parts) != count:
        shape = ":".join("ABC"[:count])
        raise RecipeError(
            f"{flag} is {text!r}; write {count} numbers as {shape}, e.g. {flag} {'0.5:1:0.05' if count == 3 else '0:4'}"
        )
    return parts


class Stopped(FreeMoEError):
    """Ctrl-C, and how to go on; exit code 130."""
