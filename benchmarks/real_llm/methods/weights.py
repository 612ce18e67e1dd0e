"""The methods that meet: each takes the same documents and steps, and says how its result is put onto the model.

A further method is one function and one ``METHODS.add``; those of whole neurons are in `methods_structured`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_llm.cells import Cell
from benchmarks.real_llm.data import Parts
from benchmarks.real_llm.protocol import Protocol
from benchmarks.rivals.training import Schedule, train_lora, tune, with_lora
from freemoe.core.registry import Registry
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches, gold_rows
from freemoe.domain_experts.purify.greedy import PurifyTask
from freemoe.domain_experts.purify.methods import METHODS as PURIFICATIONS
from freemoe.domain_experts.rank.bands import BandRankings, band_grid
from freemoe.domain_experts.rank.calibrate import calibrate
from freemoe.domain_experts.recipe import BandSection, SaliencySection
from freemoe.evals.engine.evaluator import DocumentScore, Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document
from freemoe.models.mask import Mask
from freemoe.models.precision import held_in
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix

SHOTS = 5
# The papers' bands: 5 % wide, over the whole ranking.
BANDS = BandSection(start=0.0, end=1.0, step=0.05, ratio=0.05, p="2", scope="row")
# A tiny base far from home has far to go, and its steps cost little: it takes so many times as many.
_TINY_TIMES = 5
OFF = "off|"
"""How the name of a tensor with a coded mask begins; what follows is the weight's name."""


@dataclass(eq=False)
class Stand:
    """What a method is given.

    Attributes:
        cell: Its setting.
        protocol: The terms.
        model: The base, its weights in fp32; a method may change it, as its process ends with the cell.
        tokenizer: Of the base.
        weights: Every linear weight of the decoder's layers.
        data: Documents in their roles; the reported ones are for the scorer and for oracles only.
        found: Tensors of the cell that this one begins with; empty for one that begins with the base.
    """

    cell: Cell
    protocol: Protocol
    model: Any
    tokenizer: Any
    weights: list[WeightMatrix]
    data: Parts
    found: dict[str, Tensor] = field(default_factory=dict)
    scorer: Scorer = field(init=False)

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.model, self.tokenizer, batch_tokens=self.protocol.batch_tokens)

    def batches(self, documents: Sequence[Document]) -> list[AnswerBatch]:
        """Prompts with their gold answers, or blocks of text, in padded batches."""
        rows = gold_rows(self.scorer, documents)
        return answer_batches(rows, [0] * len(rows), self.protocol.batch_tokens, self.model.device)

    def scores(self, documents: Sequence[Document], graders: dict[str, Any] | None = None) -> list[DocumentScore]:
        """Scores of documents under the model as it stands, products in the protocol's number format."""
        if documents[0].kind == "choice":
            # Whether answers may share their context is tried out in fp32: in bf16 rounding alone would forbid it.
            self.scorer.can_share(self.scorer.prompt_ids(documents[0]))
        with products(self.protocol.score):
            return Evaluator(self.scorer, graders or self.data.graders).score(documents)

    @property
    def schedule(self) -> Schedule:
        """Steps and stopping; a step of a task is a number of questions, a step of text a number of tokens."""
        schedule = self.protocol.schedule
        if self.cell.base:
            schedule = replace(schedule, steps=_TINY_TIMES * schedule.steps, every=_TINY_TIMES * schedule.every)
        if self.data.kind == "text":
            return schedule
        answers = [len(self.scorer.gold_pair(d).continuation) for d in self.data.gradient]
        tokens = max(1, round(self.protocol.step_questions * sum(answers) / len(answers)))
        return replace(schedule, step_tokens=tokens)


@dataclass(eq=False)
class Trained:
    """What a method found.

    Attributes:
        applied: Puts it onto the model inside a ``with`` block.
        losses: On the stopping documents: the base's, then one per look.
        numbers: How many numbers it ships.
        bytes: What it ships.
        share_off: Share of the weights that are off.
        tensors: What is kept of it, so that it can be tried on other documents.
        facts: What else belongs into the record.
    """

    applied: Callable[[], AbstractContextManager[Any]] = nullcontext
    losses: Sequence[float] = ()
    numbers: int = 0
    bytes: int = 0
    share_off: float = 0.0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


Method = Callable[[Stand], Trained]


def products(number_format: str) -> AbstractContextManager[Any]:
    """Take matrix products in a number format; weights, sums and what optimisers keep stay fp32."""
    if number_format == "float32":
        return nullcontext()
    # Without the cache of cast weights: weights change between two steps.
    return torch.autocast("cpu", getattr(torch, number_format), cache_enabled=False)


def trained_in(stand: Stand) -> AbstractContextManager[None]:
    """Hold the model in the number format that switches, neurons and LoRA are trained in."""
    return held_in(stand.model, getattr(torch, stand.protocol.train))


# ----------------------------------------------------------------------------------- switched off


def switches(stand: Stand, mask: Mask, **more: Any) -> Trained:
    """A result that is nothing but weights that are off."""
    kept = {OFF + name: code for name, code in mask.encode().items()}
    return Trained(
        lambda: switched_off(stand.weights, mask),
        numbers=mask.count,
        bytes=sum(t.numel() for t in kept.values()),
        share_off=mask.off_share(stand.weights),
        tensors=kept,
        **more,
    )


def purified(stand: Stand) -> Trained:
    """Signed purification of the cell's way (`purification.METHODS`) and budget."""
    looks: list[float] = []
    found = purify(stand, stand.cell.method, stand.cell.budget, looks)
    return switches(stand, found.mask, losses=list(found.losses), facts={"best_round": found.best, "off": looks})


def purify(stand: Stand, method: str, budget: float, looks: list[float] | None = None) -> Any:
    """Switch single weights off on the model as it stands; ``looks`` collects the share off per round."""
    schedule = stand.schedule
    wanted: dict[str, Any] = {
        "method": method,
        "budget": budget,
        "steps": schedule.steps,
        "step_tokens": schedule.step_tokens,
        "every": schedule.every,
        "patience": schedule.patience,
        "compute": "own" if stand.protocol.train == "float32" else stand.protocol.train,
    }
    section = SaliencySection(**wanted)
    seen: list[float] = [] if looks is None else looks
    task = PurifyTask(
        stand.model,
        stand.weights,
        stand.batches(stand.data.gradient),
        stand.batches(stand.data.stop),
        stand.data.kind == "text",
        stand.cell.seed,
        lambda number, loss, off: seen.append(off),
    )
    return PURIFICATIONS.get(method).run(task, section)


def banded(stand: Stand) -> Trained:
    """The papers' protocol: bands of the wanda ranking, the best by held-out documents; beside it the best on test."""
    batches = stand.batches([*stand.data.gradient, *stand.data.stop])
    with products(stand.protocol.score):
        norms = calibrate(stand.model, stand.weights, ((b.ids, b.mask, b.labels) for b in batches), 1)
    bands = band_grid(BANDS, "wanda", 0)
    rankings = BandRankings(stand.weights, lambda tap: norms.input_norm(tap, 0, 2.0), bands)
    held, shown = {}, {}
    for band in bands:
        with switched_off(stand.weights, rankings.mask_of_band(band)):
            held[band.name] = [s.value for s in stand.scores(stand.data.stop)]
            shown[band.name] = stand.scores(stand.data.reported)
    base = [s.value for s in stand.scores(stand.data.stop)]
    by_name = {b.name: b for b in bands}
    best = max(held, key=lambda n: sum(held[n]))
    oracle = max(shown, key=lambda n: sum(s.value for s in shown[n]))
    facts = {
        "band": best,
        "held_out_gain": (sum(held[best]) - sum(base)) / len(base),
        "oracle_band": oracle,
        "oracle": per_document(stand.data.kind, shown[oracle]),
    }
    # "No band" always competes.
    mask = rankings.mask_of_band(by_name[best]) if sum(held[best]) > sum(base) else Mask()
    return switches(stand, mask, facts=facts)


def per_document(kind: str, scores: Sequence[DocumentScore]) -> dict[str, list[float]]:
    """The part of a record that holds documents' scores: ``nll`` and ``tokens`` of text, ``right`` of questions."""
    if kind == "text":
        return {"nll": [-s.loglikelihood for s in scores], "tokens": [s.tokens for s in scores]}
    return {"right": [s.value for s in scores]}


# ----------------------------------------------------------------------------------- trained values


def lora(stand: Stand) -> Trained:
    """PEFT's LoRA beside every linear, at one rate."""
    cell = stand.cell
    gradient, stop = stand.batches(stand.data.gradient), stand.batches(stand.data.stop)
    schedule, number_format = stand.schedule, stand.protocol.train
    tuned, parameters, losses = train_lora(
        stand.model,
        stand.weights,
        gradient,
        stop,
        cell.rank,
        cell.rate,
        schedule,
        cell.seed,
        number_format=number_format,
    )
    kept = {f"lora|{i}": p.detach().clone() for i, p in enumerate(parameters)}
    _merge(stand, tuned)
    return _values(losses, parameters, kept)


def with_adapter(stand: Stand, tensors: dict[str, Tensor], rank: int) -> None:
    """Put a kept adapter into the model's weights, for good."""
    tuned, parameters = with_lora(stand.model, stand.weights, rank, 0)
    with torch.no_grad():
        for i, p in enumerate(parameters):
            p.copy_(tensors[f"lora|{i}"])
    _merge(stand, tuned)


def _merge(stand: Stand, tuned: Any) -> None:
    stand.model = tuned.merge_and_unload()
    stand.scorer = Scorer(stand.model, stand.tokenizer, batch_tokens=stand.protocol.batch_tokens)


def full(stand: Stand) -> Trained:
    """All linears of the decoder's layers trained, at one rate."""
    parameters = [w.parameter for w in stand.weights]
    gradient, stop = stand.batches(stand.data.gradient), stand.batches(stand.data.stop)
    with products(stand.protocol.train):
        losses = tune(stand.model, parameters, gradient, stop, stand.cell.rate, stand.schedule, stand.cell.seed)
    return _values(losses, parameters, {})


def _values(losses: list[float], parameters: Sequence[Any], kept: dict[str, Tensor]) -> Trained:
    numbers = sum(p.numel() for p in parameters)
    # Two bytes each: what a checkpoint in bfloat16 ships.
    return Trained(losses=losses, numbers=numbers, bytes=2 * numbers, tensors=kept)


def untouched(stand: Stand) -> Trained:
    """Nothing is trained: the base itself, and few-shot prompting, whose examples stand in the prompts."""
    return Trained()


METHODS: Registry[Method] = Registry("method of the benchmark `real`")
METHODS.add("base", untouched, "the model as it came")
METHODS.add("fewshot", untouched, f"the base, {SHOTS} examples in every prompt")
METHODS.add("learned", purified, "learned switches, at most a budget off")
METHODS.add("greedy", purified, "greedy purification, at most a budget off")
METHODS.add("bands", banded, "the papers' bands, held out and oracle")
METHODS.add("lora", lora, "LoRA of a rank at a rate")
METHODS.add("full", full, "all linears tuned at a rate")


def decided(losses: Sequence[float]) -> float:
    """Best stopping loss, by which a rate or a budget is chosen; infinite where nothing was looked at."""
    return min(losses, default=math.inf)
