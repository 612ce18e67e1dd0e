from __future__ import annotations

import importlib
from typing import Annotated

import typer
from rich.table import Table

from freemoe.cli import completion, options
from freemoe.cli.common import calm_libraries, print_json, print_table
from freemoe.core.registry import unknown_name

HELP = """List what freemoe knows by name: families, tasks, metrics, ways of purification, searches, routers, rivals, mixes,
systems; what other packages add included.

Example:

\b
  freemoe ls tasks
"""

# What is listed -> the registry's module and name, imported when it is asked for.
REGISTRIES = {
    "families": ("freemoe.models.spec", "FAMILIES"),
    "metrics": ("freemoe.domain_experts.rank.importance", "METRICS"),
    "purification": ("freemoe.domain_experts.purify.methods", "METHODS"),
    "searches": ("freemoe.domain_experts.select.search", "SEARCHES"),
    "routers": ("freemoe.domain_experts.route.levels", "LEVELS"),
    "rivals": ("freemoe.tomoe.structures.rivals", "RIVALS"),
    "mixes": ("freemoe.text.mixes", "MIXES"),
    "systems": ("freemoe.systems", "SYSTEMS"),
}
KINDS = ("tasks", *REGISTRIES)

OTHER_TASKS = (
    "lm_eval:NAME",
    "Any other task of lm-eval, or of --task-folder (freemoe lm-eval ls tasks lists them)",
    "its first mean",
    "of its YAML, shown by --dry-run",
)


def _listing_rows(kind: str) -> list[dict[str, str]]:
    if kind == "tasks":
        from freemoe.evals.tasks.benchmarks import BENCHMARKS

        rows = [(b.name, b.about, b.metric, b.split_note) for b in BENCHMARKS.values()]
        columns = ("name", "about", "metric", "local_splits")
        return [dict(zip(columns, row, strict=True)) for row in (*rows, OTHER_TASKS)]
    module, name = REGISTRIES[kind]
    registry = getattr(importlib.import_module(module), name)
    return [{"name": n, "about": registry.about(n)} for n in registry]


def run_command(
    kind: str = typer.Argument(
        None, help=f"One of {', '.join(KINDS)}; all if absent.", autocompletion=completion.complete_names(KINDS)
    ),
    dry_run: Annotated[bool, options.dry_run_option("Accepted everywhere; ls only ever reads.")] = False,
    as_json: options.Json = False,
) -> None:
    """Run ``freemoe ls`` with these options."""
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind", kind, list(KINDS))
    calm_libraries()
    found = {k: _listing_rows(k) for k in ([kind] if kind else KINDS)}
    if as_json:
        return print_json("ls", found)
    for name, rows in found.items():
        table = Table(title=name, title_justify="left", box=None, pad_edge=False)
        for column in rows[0]:
            table.add_column(column.replace("_", " "))
        for row in rows:
            table.add_row(*row.values())
        print_table(table)
