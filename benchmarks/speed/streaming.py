"""A model larger than memory: calibrated, ranked into bands and scored while its layers stay on disk.

A random bf16 checkpoint of 4 GB and one half as deep are written a layer at a time, and gone through with
``--device disk``, each in a process of its own. Counted is all that the process holds, libraries included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.harness import Figure, Outcome, Settings, in_own_process
from benchmarks.speed.memory import TOKENS, WIDTH, bench_of
from benchmarks.speed.shapes import shape_of, write_random_checkpoint
from freemoe.core.memory import free_now, peak_memory_bytes, reset_peak_memory, used_memory_bytes
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.mask import Mask

LAYERS = (22, 45)
QUICK_LAYERS = (2, 4)
MOST = 1.5
T = TypeVar("T")


def run(settings: Settings) -> Outcome:
    """Go through both checkpoints."""
    layers = QUICK_LAYERS if settings.quick else LAYERS
    model_type, shape = shape_of("1.1G", settings.quick)
    found: dict[str, Any] = {}
    with settings.progress.stage("streaming", len(layers)) as advance:
        for number in layers:
            with tempfile.TemporaryDirectory(prefix="freemoe-") as folder:
                values = shape | {"num_hidden_layers": number}
                size = write_random_checkpoint(Path(folder), model_type, settings.seed, **values)
                row = in_own_process(__name__, [folder, settings.seed])
            found[str(number)] = {"checkpoint": size, **row}
            advance(1)
    small, large = found.values()
    peaks = [max(row["peaks"].values()) for row in (small, large)]
    # A mask has one bit for every weight, in memory: that much does grow.
    grown = (peaks[1] - peaks[0]) / (large["checkpoint"] - small["checkpoint"])
    note = f"checkpoint of {large['checkpoint'] / 1e9:.1f} GB; libraries {large['before'] / 2**30:.2f} GiB of it"
    figures = (
        Figure("streaming: all that the process holds", peaks[1] / 2**30, MOST, "lower", " GiB", note=note),
        Figure(
            "streaming: growth per byte of the checkpoint", grown, 0.15, "lower", "",
            note="two masks of a bit per bf16 weight are 0.125",
        ),
    )  # fmt: skip
    return Outcome(figures, {"threads": torch.get_num_threads(), "tokens": TOKENS, "measured": found})


def weigh(folder: str, seed: int) -> dict[str, Any]:
    """Peak of every step in this process, libraries included, and its seconds."""
    before = used_memory_bytes()
    peaks: dict[str, int] = {}
    seconds: dict[str, float] = {}

    def step(name: str, work: Callable[[], T]) -> T:
        free_now()
        reset_peak_memory()
        began = time.perf_counter()
        found = work()
        seconds[name], peaks[name] = time.perf_counter() - began, peak_memory_bytes()
        return found

    band = Band("wanda", 0.2, 0.2 + WIDTH)
    bench = step("load", lambda: bench_of(load_base(folder, device="disk")[0], seed))
    norms = step("calibration", lambda: bench.norms)
    found = [
        step(
            "band",
            lambda: BandRankings(bench.weights, lambda tap: norms.input_norm(tap, 0, 2), [band]).mask_of_band(band),
        )
    ]
    # Gone with the step that scores it.
    step("scoring of the band", lambda: bench.score(found.pop()))
    step("scoring of the base", lambda: bench.score(Mask()))
    return {"before": before, "peaks": peaks, "seconds": seconds}
