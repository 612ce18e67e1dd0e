"""A model larger than memory: calibrated, ranked into bands and scored while its layers stay on disk.

A random bf16 checkpoint of 4 GB and one half as deep are written a layer at a time, and gone through with
``--device disk``, each in a process of its own. Counted is all that the process holds, libraries included.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Figure, Outcome, Settings, in_own_process
from benchmarks.speed.memory import QUICK, SHAPE, TOKENS, WIDTH, Bench, documents_of
from benchmarks.speed.scorer import word_tokenizer
from benchmarks.speed.shapes import write_random_checkpoint
from freemoe.core.memory import free_now, peak_memory_bytes, reset_peak_memory, used_memory_bytes
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.evals.engine.scorer import Scorer
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.mask import Mask
from freemoe.models.weights import find_weights

LAYERS = (22, 45)
QUICK_LAYERS = (2, 4)
STEPS = ("load", "calibration", "band", "scoring of the band", "scoring of the base")
MOST = 1.5


def run(settings: Settings) -> Outcome:
    """Go through both checkpoints."""
    layers = QUICK_LAYERS if settings.quick else LAYERS
    shape = QUICK if settings.quick else SHAPE
    found: dict[str, Any] = {}
    with settings.progress.stage("streaming", len(layers)) as advance:
        for number in layers:
            with tempfile.TemporaryDirectory(prefix="freemoe-") as folder:
                size = write_random_checkpoint(Path(folder), "llama", settings.seed, num_hidden_layers=number, **shape)
                row = in_own_process(__name__, [folder, shape["vocab_size"], settings.seed])
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


def weigh(folder: str, vocabulary: int, seed: int) -> dict[str, Any]:
    """Peak of every step in this process, libraries included, and its seconds."""
    before = used_memory_bytes()
    peaks: dict[str, int] = {}
    seconds: dict[str, float] = {}
    state: dict[str, Any] = {}

    def load() -> None:
        model, _ = load_base(folder, device="disk")
        scorer = Scorer(model, word_tokenizer(vocabulary), batch_tokens=TOKENS)
        state["bench"] = Bench(model, find_weights(model), scorer, documents_of(vocabulary, seed))

    def calibration() -> None:
        state["norms"] = state["bench"].norms

    def band() -> None:
        chosen = Band("wanda", 0.2, 0.2 + WIDTH)
        rankings = BandRankings(state["bench"].weights, lambda tap: state["norms"].input_norm(tap, 0, 2), [chosen])
        state["mask"] = rankings.mask_of_band(chosen)

    def score_band() -> None:
        state["bench"].score(state.pop("mask"))

    def score_base() -> None:
        state["bench"].score(Mask())

    for name, step in zip(STEPS, (load, calibration, band, score_band, score_base), strict=True):
        free_now()
        reset_peak_memory()
        began = time.perf_counter()
        step()
        seconds[name], peaks[name] = time.perf_counter() - began, peak_memory_bytes()
    return {"before": before, "peaks": peaks, "seconds": seconds}
