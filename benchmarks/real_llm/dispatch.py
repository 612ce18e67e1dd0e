"""Which function measures a cell, by its family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.real_llm.methods import mixtures
from benchmarks.real_llm.methods.null import null_builds
from benchmarks.real_llm.methods.routing import routed
from benchmarks.real_llm.work import Job, measure_cell

_OWN_WAYS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "null": null_builds,
    "route": routed,
    "convert": mixtures.converted,
    "mixture": mixtures.split,
    "trim": mixtures.trimmed,
}


def run_cell(job: Job) -> dict[str, Any]:
    """Measure one cell; returns its record."""
    return _OWN_WAYS.get(job.cell.family, measure_cell)(job)
