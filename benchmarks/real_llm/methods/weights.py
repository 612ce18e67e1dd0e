"""What a method is given (`Stand`), and the methods that meet: blocks in which the model is theirs, as those of `rivals` are.

A further method is one function and one ``METHODS.add``; those of whole neurons are in `structured`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_llm.cells import Cell
from benchmarks.real_llm.data import Parts
from benchmarks.real_llm.protocol import Protocol
from benchmarks.rivals.fits.masks import OFF, purified
from benchmarks.rivals.fits.tuned import low_rank
from benchmarks.rivals.rival import Fitted, Materials, Schedule, Terms
from benchmarks.rivals.training import with_lora
from freemoe.core.registry import Registry
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches, gold_rows
from freemoe.evals.engine.evaluator import DocumentScore, Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document
from freemoe.models.mask import Mask
from freemoe.models.weights import WeightMatrix

# A tiny base far from home has far to go, and its steps cost little: it takes so many times as many.
_TINY_TIMES = 5


@dataclass(eq=False)
class Stand:
    """A cell on its base, as its process has it."""

    cell: Cell  # Its setting
    protocol: Protocol  # The terms
    model: Any  # The base, its weights in fp32; a method may change it, as its process ends with the cell
    tokenizer: Any  # Of the base
    weights: list[WeightMatrix]  # Every linear weight of the decoder's layers
    data: Parts  # Documents in their roles; the reported ones are for the scorer and for oracles only
    # Tensors of the cell that this one begins with; empty for one that begins with the base
    found: dict[str, Tensor] = field(default_factory=dict)
    scorer: Scorer = field(init=False)

    def __post_init__(self) -> None:
        self.use(self.model)

    def use(self, model: Any) -> None:
        """Score another model from now on."""
        self.model = model
        self.scorer = Scorer(model, self.tokenizer, batch_tokens=self.protocol.batch_tokens)

    @property
    def materials(self) -> Materials:
        """What a method may look at."""
        data = self.data
        documents = tuple(data.gradient), tuple(data.stop)
        return Materials(
            data.kind, self.tokenizer, self.scorer.max_length, self.weights, *documents, self.batches, alone=True
        )

    @property
    def terms(self) -> Terms:
        """The terms on which the methods of the cell meet."""
        cell = self.cell
        return Terms(cell.budget, cell.rank, cell.rate, cell.seed, self.schedule, self.protocol.train)

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


Method = Callable[[Stand], AbstractContextManager[Fitted]]


def products(number_format: str) -> AbstractContextManager[Any]:
    """Take matrix products in a number format; weights, sums and what optimisers keep stay fp32."""
    if number_format == "float32":
        return nullcontext()
    # Without the cache of cast weights: weights change between two steps.
    return torch.autocast("cpu", getattr(torch, number_format), cache_enabled=False)


def per_document(kind: str, scores: Sequence[DocumentScore]) -> dict[str, list[float]]:
    """The part of a record that holds documents' scores: ``nll`` and ``tokens`` of text, ``right`` of questions."""
    if kind == "text":
        return {"nll": [-s.loglikelihood for s in scores], "tokens": [s.tokens for s in scores]}
    return {"right": [s.value for s in scores]}


def with_adapter(stand: Stand, tensors: dict[str, Tensor], rank: int) -> None:
    """Put a kept adapter into the model's weights, for good."""
    tuned, parameters = with_lora(stand.model, stand.weights, rank, 0)
    with torch.no_grad():
        for i, p in enumerate(parameters):
            p.copy_(tensors[f"lora|{i}"])
    stand.use(tuned.merge_and_unload())


def joined(weights: Sequence[WeightMatrix], experts: Sequence[dict[str, Tensor]]) -> Mask:
    """What any of several kept experts switches off."""
    codes = ({k.removeprefix(OFF): code for k, code in found.items() if k.startswith(OFF)} for found in experts)
    return Mask().union(*(Mask.decode(own, weights) for own in codes))


METHODS: Registry[Method] = Registry("method of the benchmark `real`")
METHODS.add("base", lambda stand: nullcontext(Fitted()), "the model as it came")
for _name, _way in (("learned", "learned switches"), ("greedy", "greedy purification")):
    METHODS.add(
        _name, lambda s: purified(s.model, s.materials, s.terms, method=s.cell.method), f"{_way}, at most a budget off"
    )
METHODS.add("lora", lambda stand: low_rank(stand.model, stand.materials, stand.terms), "LoRA of a rank at a rate")
