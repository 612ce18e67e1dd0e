"""`--dry-run`: what a build would do, counted on the real data, timed on one real batch."""

from __future__ import annotations

import math
import time
from typing import Any

from freemoe.domain_experts.bands import grid
from freemoe.domain_experts.importance import METRICS
from freemoe.domain_experts.subdomains import divide, features
from freemoe.domain_experts.workbench import Workbench, prepare
from freemoe.recipes import BuildRecipe

# Rounds that greedy purification takes before it stops, as seen on small models; the budget caps it.
_TYPICAL_ROUNDS = 25
# A backward pass costs about two forward passes.
_BACKWARD = 3


def plan(recipe: BuildRecipe) -> dict[str, Any]:
    """Count units of work, memory and time of a build; loads data and base, writes nothing.

    Returns:
        Name of each figure to its value, in the order to print them.
    """
    bench = prepare(recipe)
    subdomains, reference, reported = [], 0, 0
    for name, data in bench.domains.items():
        ids = [bench.scorer.prompt_ids(d) for d in data.reference.documents]
        part = divide(
            name, data.reference, features(bench.model, ids, recipe.subdomains.feature), recipe.subdomains, recipe.seed
        )
        subdomains += list(part.names)
        reference += len(data.reference)
        reported += len(data.reported)
    bands = sum(
        len(grid(recipe.bands, m, recipe.seed)) for m in recipe.search.metrics if METRICS.get(m).needs != "gradients"
    )
    fitted = any(METRICS.get(m).needs == "gradients" for m in recipe.search.metrics)
    per_document = _seconds_per_document(bench)
    # Halving scores everything on an eighth or so, and half as many candidates on twice as much each round.
    share = 1.0 if recipe.search.method == "exhaustive" else min(1.0, (2 + math.log2(max(2, bands))) / max(1, bands))
    passes = {
        "calibration": float(any(METRICS.get(m).needs == "norms" for m in recipe.search.metrics)),
        "signed purification": _TYPICAL_ROUNDS
        * (_BACKWARD * recipe.saliency.gradient_share + recipe.saliency.stop_share)
        if fitted
        else 0.0,
        "search": 1 + bands * share + fitted * 0.3,
    }
    evidence = 2 + recipe.evidence.controls + ((bands + fitted) if recipe.evidence.oracle else 0)
    seconds = per_document * (reference * sum(passes.values()) + reported * evidence)
    parameters = sum(p.numel() * p.element_size() for p in bench.model.parameters())
    trained = sum(w.size * w.parameter.element_size() for w in bench.weights) if fitted else 0
    orders = sum(w.size for w in bench.weights) * 2 if bands else 0
    return {
        "domains": ", ".join(
            f"{n} ({len(d.reference)} reference, {len(d.reported)} reported)" for n, d in bench.domains.items()
        ),
        "splits": "; ".join(note for d in bench.domains.values() for note in d.notes),
        "subdomains": len(subdomains),
        "bands_per_subdomain": bands,
        "units_of_work": (
            f"{len(subdomains) * bands} candidate bands, {len(subdomains) * fitted} purifications, "
            f"{round(reference * passes['search'])} document scores to search, {round(reported * evidence)} to report"
        ),
        "memory": f"about {(parameters + trained + orders) / 2**20:,.0f} MiB beside the libraries",
        "time": f"about {_words(seconds)} on this machine, from one batch of this model ({per_document * 1000:.1f} ms a document)",
        "output": recipe.output,
    }


def _seconds_per_document(bench: Workbench) -> float:
    """Time of scoring some documents; the first pass warms up, the second is measured."""
    elapsed, scored = 0.0, 0
    for _ in range(2):
        start, scored = time.perf_counter(), 0
        for name, data in bench.domains.items():
            documents = data.reference.documents[:32]
            bench.evaluators[name].score(documents)
            scored += len(documents)
        elapsed = time.perf_counter() - start
    return elapsed / scored


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
