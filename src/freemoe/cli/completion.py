"""What the shell completes beside commands and options: names, read without torch, and silently where there is nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer

from freemoe.core.files import MANIFEST
from freemoe.core.untrusted import read_json

Complete = Callable[[typer.Context, str], list[str]]

BUNDLED = ("freemoe-demo", "freemoe-demo-moe")
DEVICES = ("auto", "cpu", "cuda", "disk", "split")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def complete_names(known: Iterable[str] | Callable[[], Iterable[str]]) -> Complete:
    """Complete one of several names, or the last of a list with commas."""

    def complete_last(context: typer.Context, incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        found = known() if callable(known) else known
        return [f"{before}{comma}{name}" for name in found if name.startswith(last)]

    return complete_last


def _local_folders(incomplete: str, patterns: Sequence[str]) -> list[str]:
    """Folders of the current one that hold such a file."""
    if "/" in incomplete:
        return []  # the shell completes paths
    found = {path.parts[0] for pattern in patterns for path in Path().glob(pattern)}
    return sorted(name for name in found if name.startswith(incomplete))


def complete_models(context: typer.Context, incomplete: str) -> list[str]:
    """Bundled models, and model folders and GGUF files that stand here."""
    bundled = [name for name in BUNDLED if name.startswith(incomplete)]
    return bundled + _local_folders(incomplete, ("*/config.json", "*.gguf"))


def complete_artefacts(context: typer.Context, incomplete: str) -> list[str]:
    """Folders below this one that hold an artefact."""
    return _local_folders(incomplete, (f"*/{MANIFEST}",))


def complete_artefacts_and_models(context: typer.Context, incomplete: str) -> list[str]:
    """Folders of artefacts, then folders and names of models."""
    return list(dict.fromkeys([*complete_artefacts(context, incomplete), *complete_models(context, incomplete)]))


def complete_experts(context: typer.Context, incomplete: str) -> list[str]:
    """The experts of the artefact that the command line names, beside base and auto."""
    # Where an option waits for its value, no argument has its name yet.
    artefact = context.params.get("artefact") or next(iter(context.args), "")
    try:
        manifest = read_json(Path(artefact) / MANIFEST)
        own = [str(expert["name"]) for expert in manifest.get("experts", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        own = []
    return [name for name in ("auto", "base", *own) if name.startswith(incomplete)]


def schema_names() -> list[str]:
    """Every name that `freemoe schema` accepts."""
    from freemoe.cli.schemas import DOCUMENTS
    from freemoe.systems import SYSTEMS

    return [*SYSTEMS.loaded_names(), *DOCUMENTS]


def complete_domains(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the task behind ``NAME=``; nothing before the sign."""
    from freemoe.evals.tasks.benchmarks import BENCHMARKS

    name, equals, tasks = incomplete.partition("=")
    return [f"{name}={task}" for task in complete_names(BENCHMARKS)(context, tasks)] if equals else []
