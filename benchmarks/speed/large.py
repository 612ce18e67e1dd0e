"""A random base of Llama-2-7B's shape in bfloat16: what calibration and learned switches cost there, and what every stage holds.

Made for an accelerator, whose memory the whole base shares with what is measured: ``python -m benchmarks large --device cuda``. The
weights are drawn there, matrix by matrix. A part that fails (say, for want of memory) says so and the others go on.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.devices import wait, weighed
from benchmarks.harness import Figure, Outcome, Settings, in_turns, ratio
from benchmarks.speed import calibrate, memory
from benchmarks.speed.purify_step import random_batch, switches_step
from benchmarks.speed.shapes import random_model, shape_of
from freemoe.core.errors import FreeMoEError
from freemoe.domain_experts.cost.memory import FITTED, STAGES
from freemoe.models.weights import find_weights

SHAPE = shape_of("Llama-2-7B")[1] | {"vocab_size": 32000, "max_position_embeddings": 4096}
# The report's controls are drawn on the host, 6.5 G weights one after the other: minutes that say nothing of a device.
WEIGHED = tuple(stage for stage in STAGES if stage != "report")
PARTS = ("cost: calibration", "cost: learned", *(f"memory: {stage}" for stage in WEIGHED))

Found = tuple[list[Figure], dict[str, Any]]


def run(settings: Settings) -> Outcome:
    """Make the base, then measure the parts that are asked for."""
    began = time.perf_counter()
    shape = shape_of("quick")[1] if settings.quick else SHAPE
    model = random_model("llama", settings.seed, torch.bfloat16, settings.device, **shape)
    wait()
    weights = sum(w.size for w in find_weights(model))
    details: dict[str, Any] = {
        "shape": shape,
        "weights": weights,
        "base_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "seconds_to_make": round(time.perf_counter() - began, 2),
    }
    works: dict[str, Callable[[], Found]] = {
        "cost: calibration": lambda: _calibration(model, settings),
        "cost: learned": lambda: _learned(model, weights, settings),
    }
    bench = memory.bench_of(model, settings.seed)
    works |= {f"memory: {stage}": lambda stage=stage: _stage(bench, stage, weights, settings) for stage in WEIGHED}
    figures: list[Figure] = []
    with settings.progress.stage("large", len(works)) as advance:
        for name, work in works.items():
            if settings.wants(name):
                try:
                    found, details[name] = work()
                except (RuntimeError, FreeMoEError) as error:
                    found = [Figure(name, math.nan, note=str(error).strip()[:300])]
                    details[name] = {"error": str(error)}
                figures += found
            advance(1)
    return Outcome(tuple(figures), details)


def _calibration(model: Any, settings: Settings) -> Found:
    """All norms of twelve subdomains over a plain pass of the same 2,048 tokens."""
    times, details = calibrate.contest(model, settings, 1, settings.rounds)
    speed = details["tokens"] / statistics.median(details["seconds"]["calibrate"])
    plain = details["tokens"] / statistics.median(details["seconds"]["plain"])
    note = f"a plain forward pass: {plain:,.0f}"
    return [
        Figure("7B shape, calibration over a plain forward pass", times),
        Figure("7B shape, calibration", speed, unit=" tokens/s", digits=0, note=note),
    ], details


def _learned(model: Any, weights: int, settings: Settings) -> Found:
    """Steps of learned switches beside forward passes of the same batch."""
    batch = random_batch(model, settings)

    @torch.no_grad()
    def plain() -> None:
        model.base_model(input_ids=batch.ids, attention_mask=batch.mask.to(model.device), use_cache=False)

    def both() -> dict[str, list[float]]:
        step = switches_step(model, find_weights(model), batch)
        return in_turns({"step": step, "plain": plain}, settings.rounds)

    seconds, peak, _ = weighed(settings.device, both)
    each, tokens = statistics.median(seconds["step"]), batch.ids.numel()
    return [
        Figure("7B shape, a step of learned switches", each, unit=" s", note=f"{tokens / each:,.0f} tokens/s"),
        Figure("7B shape, a step of learned switches over a plain forward pass", ratio(seconds, "step", "plain")),
        Figure(
            "7B shape, peak of learned switches above the base",
            peak / 2**30,
            unit=" GiB",
            note=f"{peak / weights:.2f} bytes per candidate",
        ),
    ], {"tokens": tokens, "seconds": seconds, "peak": peak}


def _stage(bench: memory.Bench, stage: str, weights: int, settings: Settings) -> Found:
    """Peak of a stage of a build above the base, beside what the dry run says."""
    found, seconds = memory.weigh_stage(stage, bench, settings.device)
    note = f"the dry run says {found['said'] / 2**30:.2f}; {seconds:.1f} s"
    if stage in FITTED:
        note += f"; {found['peak'] / weights:.2f} bytes per candidate"
    most = round(found["most"] / 2**30, 2)
    name = f"7B shape, {stage}: peak above the base"
    figure = Figure(name, found["peak"] / 2**30, most, "lower", " GiB", note=note)
    return [figure], {**found, "seconds": round(seconds, 2)}
