from __future__ import annotations

from typing import Any

import typer

from freemoe.cli import options
from freemoe.cli.flags import run_options, with_signature

HELP = """Build experts for the bundled tiny model on the bundled benchmark: everything freemoe does, in minutes.

The tiny base was trained on conflicting sources ON PURPOSE, so that there is something to switch off in the domain
code, and nothing in the domain general. It shows the machinery, not that large models hold noise weights.

Example:

\b
  freemoe demo -o demo-out
"""


@with_signature(
    {
        "output": (str, typer.Option("demo-out", "--output", "-o", help="Folder to write.")),
        "seed": (int, typer.Option(0, help="Seed of splits, masks and draws.")),
        "limit": (int, typer.Option(None, help="Documents per task and split; all if absent.")),
        "threads": (options.Threads, None),
        "workers": (int, typer.Option(None, min=1, help="Processes that work side by side; the same bytes. [1]")),
        **run_options("units of work, memory and time"),
    }
)
def run_command(**values: Any) -> None:
    """Run ``freemoe demo`` with these options."""
    from freemoe.cli.build import COMMAND
    from freemoe.core.ledger import keep_none
    from freemoe.domain_experts.demo import demo_recipe

    keep_none()
    sizes = {name: values[name] for name in ("seed", "limit", "threads", "workers")}
    COMMAND.execute_recipe(demo_recipe(values["output"], **sizes), values)
