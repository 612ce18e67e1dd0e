"""One cell measured, in a process of its own: so that its time and its memory are its own."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from benchmarks.real_llm.protocol import Job
from benchmarks.real_llm.work import open_stand, record_of
from benchmarks.rivals.plan import MATERIALS
from benchmarks.rivals.rival import RIVALS
from freemoe.core.memory import free_now, peak_memory_bytes, reset_peak_memory, used_memory_bytes
from freemoe.domain_experts.purify.batches import mean_loss


def measure_rival(job: Job) -> dict[str, Any]:
    """Fit a rival on the reference documents and score it on those that nothing chose by.

    Returns:
        The cell's record: per reported document ``nll`` and ``tokens`` or ``right``; ``losses``, ``numbers``, ``bytes``,
        ``share_off``; ``seconds`` of the fit, and ``memory_bytes``, its peak above the loaded base.
    """
    stand = open_stand(job, MATERIALS)
    materials, terms = replace(stand.materials, alone=False), stand.terms
    # Once before anything is measured: what a first pass keeps for good is the base's.
    mean_loss(stand.model, materials.batches(materials.stop[:1]))
    free_now()
    reset_peak_memory()
    held, began = used_memory_bytes(), time.perf_counter()
    with RIVALS.get(job.cell.method).on(stand.model, materials, terms) as fitted:
        seconds, memory = time.perf_counter() - began, max(0, peak_memory_bytes() - held)
        began = time.perf_counter()
        record = record_of(stand, fitted)
    return {
        **record,
        "facts": fitted.facts,
        "seconds": seconds,
        "score_seconds": time.perf_counter() - began,
        "memory_bytes": memory,
    }
