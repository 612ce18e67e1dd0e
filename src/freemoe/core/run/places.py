"""Where units of work are done, as a recipe spells it: ``local``, ``local:N``, ``ray``, ``ray://HOST:PORT``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from freemoe.core.errors import RecipeError

MOST_WORKERS = 4096
"""Nobody has more; a number above it is a mistake."""

ALLOWED = "local, local:N (N processes), ray (a Ray of this machine alone), ray://HOST:PORT (a cluster)"

_CLUSTER = re.compile(r"ray://[^\s/:@]+:([0-9]{1,5})|ray://\[[0-9a-fA-F:]+\]:([0-9]{1,5})")


@dataclass(frozen=True)
class ExecutorSpec:
    """Where units of work are done, and by how many."""

    ray: bool = False  # On Ray, and not by processes of this machine
    workers: int | None = 1  # By how many; None for as many as Ray has room for
    address: str | None = None  # Of the cluster; None for a Ray of this machine alone

    @property
    def is_parallel(self) -> bool:
        """Whether there is anybody but this process."""
        return self.ray or self.workers != 1


def parse_executor_spec(text: str, workers: int = 1) -> ExecutorSpec:
    """Read where units are done."""
    kind, _, rest = text.partition(":")
    if text == "local":
        return ExecutorSpec(workers=workers)
    if kind == "local" and re.fullmatch("[0-9]+", rest) and 1 <= int(rest[:6]) <= MOST_WORKERS:
        if workers not in (1, int(rest)):
            raise RecipeError(
                f"--on {text} and --workers {workers} ask for two numbers of processes: give one of them."
            )
        return ExecutorSpec(workers=int(rest))
    asked = None if workers == 1 else workers
    if text == "ray":
        return ExecutorSpec(ray=True, workers=asked)
    cluster = _CLUSTER.fullmatch(text)
    if cluster and 1 <= int(cluster[1] or cluster[2]) <= 65535:
        return ExecutorSpec(ray=True, workers=asked, address=text)
    raise RecipeError(
        f"Units of work cannot be done on {text!r}. Allowed: {ALLOWED}, N and --workers from 1 to {MOST_WORKERS}."
    )


def executor_spec_of(recipe: Any) -> ExecutorSpec:
    """Where a recipe's units are done."""
    return parse_executor_spec(recipe.place, recipe.workers)
