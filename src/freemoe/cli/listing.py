"""`freemoe ls`."""

from __future__ import annotations

import typer
from rich.table import Table

from freemoe.cli.common import calm_libraries, out, print_json
from freemoe.core.registry import unknown_name

HELP = """List what freemoe knows by name: families, tasks, metrics, searches, mixes, benchmarks.

Example:

\b
  freemoe ls tasks
"""

KINDS = ("families", "tasks", "metrics", "searches", "mixes", "benchmarks")


def _rows(kind: str) -> list[dict[str, str]]:
    if kind == "tasks":
        from freemoe.evals.tasks.benchmarks import BENCHMARKS

        return [
            {"name": b.name, "about": b.about, "metric": b.metric, "splits (local files)": b.split_note}
            for b in BENCHMARKS.values()
        ]
    if kind == "families":
        from freemoe.models.spec import FAMILIES as registry
    elif kind == "metrics":
        from freemoe.domain_experts.rank.importance import METRICS as registry
    elif kind == "searches":
        from freemoe.domain_experts.select.search import SEARCHES as registry
    elif kind == "mixes":
        from freemoe.text.mixes import MIXES as registry
    else:
        from freemoe.bench.harness import BENCHES as registry
    return [{"name": n, "about": registry.about(n)} for n in registry]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("ls", help=HELP)
    def command(
        kind: str = typer.Argument(None, help=f"One of {', '.join(KINDS)}; all if absent."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Accepted everywhere; ls only ever reads."),
        as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
    ) -> None:
        if kind is not None and kind not in KINDS:
            raise unknown_name("kind", kind, list(KINDS))
        calm_libraries()
        found = {k: _rows(k) for k in ([kind] if kind else KINDS)}
        if as_json:
            print_json(found)
            return
        for name, rows in found.items():
            table = Table(title=name, title_justify="left", box=None, pad_edge=False)
            for column in rows[0]:
                table.add_column(column, overflow="fold")
            for row in rows:
                table.add_row(*row.values())
            out.print(table)
