"""What every command shares: bars with the time left, quiet libraries, JSON on standard output."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from freemoe.core.errors import RecipeError
from freemoe.recipes import Recipe, dump

console = Console(stderr=True)
# A table that goes to a file or a pipe is not squeezed into the 80 columns that nobody looks through.
out = Console(width=None if sys.stdout.isatty() else 118)


class Bars:
    """Progress bars on standard error with elapsed time and ETA; standard output stays for results."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Draw one bar while the stage lasts; a plain line where there is no terminal."""
        if self.quiet:
            yield lambda steps: None
            return
        columns = (
            TextColumn("{task.description:22}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bars:
            task = bars.add_task(name, total=total)
            yield lambda steps: bars.advance(task, steps)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def calm_libraries() -> None:
    """Keep other libraries' bars, warnings and network calls out of the way; called once per command."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    # What became of a base while it was loaded, and as what a file was read, belong to the output.
    for room in ("freemoe.models", "freemoe.text"):
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


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def say(line: str) -> None:
    """Print a line as it is: no markup, no colours, not broken."""
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def print_outlook(found: dict[str, Any], as_json: bool) -> None:
    """Print what a dry run found, one line each."""
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        say(f"{key.replace('_', ' ')}: {value}")


def set_path(target: dict[str, Any], path: str, value: Any) -> None:
    """Set ``a.b.c`` in nested dicts."""
    *parents, last = path.split(".")
    for part in parents:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise RecipeError(f"--set {path}: {part!r} is a value, not a section.")
    target[last] = value


def apply_sets(target: dict[str, Any], sets: list[str]) -> None:
    """Apply ``--set section.key=value`` options; values are YAML."""
    import yaml

    for item in sets:
        path, equals, text = item.partition("=")
        if not equals:
            raise RecipeError(f"--set {item!r}: write PATH=VALUE, e.g. --set search.alpha=0.1")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise RecipeError(f"--set {item!r}: {text!r} is not valid YAML; a list is written [1, 2]") from None
        set_path(target, path.strip(), value)


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


def print_recipe(recipe: Recipe) -> None:
    """Print the YAML that ``freemoe run`` repeats."""
    sys.stdout.write(dump(recipe))


def numbers(text: str, flag: str, count: int, kind: type = float) -> list[Any]:
    """Read ``a:b:c``."""
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


def require_artefact(path: Path) -> None:
    """Say early that a folder is no artefact."""
    from freemoe.core.artifacts import read_manifest

    read_manifest(path, check=False)


def stopped(message: str) -> typer.Exit:
    """The exit of a command that ctrl-C stopped."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(130)
