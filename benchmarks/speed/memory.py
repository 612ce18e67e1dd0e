"""Peak memory of every stage above the loaded base, at two sizes of a random bf16 Llama, and at 7B and 70B by arithmetic.

Every stage runs in a process of its own. What it holds above the base is held against the table of `docs/hardware.md`
and against what ``build --dry-run`` says for the same model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.devices import weighed
from benchmarks.harness import Figure, Outcome, Settings, in_own_process
from benchmarks.speed.artefact import PUBLISHED, stand_in
from benchmarks.speed.scorer import word_tokenizer
from benchmarks.speed.shapes import shaped_model
from freemoe.domain_experts.cost.memory import FITTED, STAGES, stage_peaks
from freemoe.domain_experts.expert import switch_expert
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches, gold_rows
from freemoe.domain_experts.purify.greedy import PurifyTask, greedy_purify
from freemoe.domain_experts.purify.learned import learn_switches
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.domain_experts.rank.calibrate import InputNorms, calibrate
from freemoe.domain_experts.rank.random_mask import random_mask
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document
from freemoe.models.mask import Mask
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix, find_weights

# The second one is half as deep.
LAYERS = (11, 22)
QUICK_LAYERS = (1, 2)
ELSEWHERE = ("Llama-2-7B", "Llama-2-70B")
# Tokens of a batch, in documents of this length; a sum of gradients takes two batches.
TOKENS, LENGTH = 1024, 256
WIDTH = 0.1
BUDGET = 0.01
# One round of greedy cuts, as the recipe has it by default.
CUT = 5e-5
AGREES = 0.25


@dataclass(frozen=True, eq=False)
class Bench:
    """A loaded base and what the stages are given; documents are text of random words."""

    model: Any
    weights: list[WeightMatrix]
    scorer: Scorer
    documents: Sequence[Document]

    @property
    def batches(self) -> list[AnswerBatch]:
        """The documents in batches of `TOKENS`."""
        rows = gold_rows(self.scorer, self.documents)
        return answer_batches(rows, [0] * len(rows), TOKENS, self.model.device)

    @property
    def norms(self) -> InputNorms:
        """Of one calibration."""
        return calibrate(self.model, self.weights, ((b.ids, b.mask, b.labels) for b in self.batches), 1)

    def score(self, mask: Mask) -> None:
        """Score all documents with a mask off."""
        with switched_off(self.weights, mask):
            Evaluator(self.scorer, {}).score(self.documents)


def run(settings: Settings) -> Outcome:
    """Weigh every stage at both sizes, and compute the others."""
    layers = QUICK_LAYERS if settings.quick else LAYERS
    found: dict[str, dict[str, Any]] = {}
    with settings.progress.stage("memory", len(layers) * len(STAGES)) as advance:
        for number in layers:
            for stage in STAGES:
                row = in_own_process(__name__, [stage, number, settings.quick, settings.seed])
                found.setdefault(stage, {})[str(number)] = row
                advance(1)
    figures = [figure for stage in STAGES for figure in _figures(stage, found[stage])]
    elsewhere = {} if settings.quick else {name: _computed(stand_in(*PUBLISHED[name])) for name in ELSEWHERE}
    details = {
        "threads": torch.get_num_threads(),
        "tokens": TOKENS,
        "layers": list(layers),
        "measured": found,
        "computed": elsewhere,
    }
    return Outcome(tuple(figures), details)


def _figures(stage: str, rows: dict[str, Any]) -> list[Figure]:
    """The larger model's peak against the table and against the dry run, and the slope between the two."""
    small, large = rows.values()
    slope = (large["peak"] - small["peak"]) / (large["weights"] - small["weights"])
    note = f"{large['peak'] / large['weights']:.2f} bytes per weight, {slope:.2f} between the two sizes"
    off = large["peak"] / large["said"] - 1
    most = round(large["most"] / 2**30, 2)
    return [
        Figure(f"{stage}: peak above the base", large["peak"] / 2**30, most, "lower", " GiB", note=note),
        Figure(
            f"{stage}: how far from what the dry run says",
            100 * abs(off),
            100 * AGREES,
            "lower",
            " %",
            0,
            f"{off:+.0%}",
        ),
    ]


def _computed(model: Any) -> dict[str, Any]:
    weights = find_weights(model)
    size = sum(w.size for w in weights)
    found: dict[str, Any] = {"base": sum(p.numel() * p.element_size() for p in model.parameters())}
    for stage, peak in stage_peaks(model, weights, TOKENS, WIDTH, BUDGET).items():
        found[stage] = {"said": peak.expected, "most": peak.most, "bytes_per_weight": round(peak.expected / size, 3)}
    return found


def weigh(stage: str, layers: int, quick: bool, seed: int) -> dict[str, Any]:
    """Peak of a stage above the base in this process, and what was said of it."""
    settings = Settings(quick=quick, seed=seed)
    bench = bench_of(shaped_model("1.1G", settings, torch.bfloat16, num_hidden_layers=layers), seed)
    sizes = {
        "weights": sum(w.size for w in bench.weights),
        "parameters": sum(p.numel() for p in bench.model.parameters()),
    }
    return weigh_stage(stage, bench, "cpu")[0] | sizes


def weigh_stage(stage: str, bench: Bench, device: str) -> tuple[dict[str, float], float]:
    """Peak of a stage above the base, what is said of it, and its seconds."""
    # Libraries and buffers that a first pass makes, whatever its size.
    bench.score(Mask())
    work = prepared(stage, bench)
    said = stage_peaks(bench.model, bench.weights, TOKENS, WIDTH, BUDGET)[stage]
    _, peak, seconds = weighed(device, work)
    return {"peak": peak, "said": said.expected, "most": said.most}, seconds


def bench_of(model: Any, seed: int) -> Bench:
    """A base with documents of random words, two batches of them."""
    vocabulary = model.config.vocab_size
    scorer = Scorer(model, word_tokenizer(vocabulary), batch_tokens=TOKENS)
    rng = random.Random(seed)
    texts = [" ".join(f"w{rng.randrange(3, vocabulary)}" for _ in range(LENGTH)) for _ in range(2 * TOKENS // LENGTH)]
    documents = [Document("text", str(i), str(i), "text", "", (t,), 0, index=i) for i, t in enumerate(texts)]
    return Bench(model, find_weights(model), scorer, documents)


def prepared(stage: str, bench: Bench) -> Callable[[], Any]:
    """What a stage does, after what it needs was made."""
    if stage == "scoring":
        return lambda: bench.score(Mask())
    if stage == "calibration":
        return lambda: bench.norms
    if stage in FITTED:
        first, *others = bench.batches
        # Learned switches stop on what they learn from, so that they find something even in random weights: a forecast is
        # made of that.
        task = PurifyTask(bench.model, bench.weights, [first], others if stage == "greedy" else [first])
        if stage == "greedy":
            return lambda: greedy_purify(task, SaliencySection(step=CUT, budget=CUT))
        return lambda: learn_switches(task, SaliencySection(budget=BUDGET, steps=3, step_tokens=TOKENS, every=3))
    norms = bench.norms

    def rank(*starts: float) -> tuple[list[Band], BandRankings]:
        bands = [Band("wanda", start, start + WIDTH) for start in starts]
        return bands, BandRankings(bench.weights, lambda tap: norms.input_norm(tap, 0, 2), bands)

    if stage == "band search":

        def search() -> None:
            bands, rankings = rank(0.0, WIDTH)
            for band in bands:
                bench.score(rankings.mask_of_band(band))

        return search
    (band,), rankings = rank(0.4)
    first = {w.name: torch.arange(math.ceil(BUDGET * w.size)) for w in bench.weights}
    expert = switch_expert("expert", random_mask(Mask.of_indices(first, bench.weights), 0))

    def report() -> None:
        """Accepted experts are kept as they are written; their masks, the controls' and the oracle's are made one at a time."""
        for mask in (lambda: expert.mask(bench.weights), lambda: rankings.mask_of_band(band)):
            bench.score(mask())
            bench.score(random_mask(mask(), 1))

    return report
