"""The one evaluator: documents of any kind scored under a model as it stands, each graded by its own task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from freemoe.core.errors import NumericError
from freemoe.evals.engine.sampling import GREEDY, SamplingConfig
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document
from freemoe.evals.tasks.task import TaskGrader


class DocumentScore(NamedTuple):
    """The scores of one document."""

    # The reported figure, higher is better: 1 or 0 for right or wrong, the log-likelihood per token for text
    value: float
    loglikelihood: float  # Of the gold answer in nats, or NaN where it was not asked for
    tokens: int  # Tokens that the log-likelihood sums over
    # Other figures of the same answer, by name: acc_norm beside acc, pass@10 beside pass@1, the strict filter beside
    # the flexible one; of text the log-likelihood per word
    also: tuple[tuple[str, float], ...] = ()


class Evaluator:
    """Scores documents of any kind and lets each task grade its own.

    ``scorer``: scores token sequences on the model as it stands. ``graders``: graders by the name of their task. ``gold``:
    also score the gold answers of generated tasks (needed for the log-likelihood objective). ``sampling``: how answers are
    drawn of tasks that report pass@k; other answers are greedy.
    """

    def __init__(
        self, scorer: Scorer, graders: dict[str, TaskGrader], gold: bool = False, sampling: SamplingConfig = GREEDY
    ) -> None:
        self.sampling = sampling
        self.scorer = scorer
        self.graders = graders
        self.gold = gold

    def score(self, documents: Sequence[Document]) -> list[DocumentScore]:
        """Score documents, in their order.

        Raises:
            NumericError: Where a metric gives a document no number: a search would pass over it.
        """
        results: list[DocumentScore | None] = [None] * len(documents)
        likely = [i for i, d in enumerate(documents) if d.kind in ("choice", "target", "text")]
        pairs, owners = [], []
        for i in likely:
            for pair in self.scorer.document_pairs(documents[i]):
                pairs.append(pair)
                owners.append(i)
        answers: dict[int, list] = {i: [] for i in likely}
        for i, answer in zip(owners, self.scorer.score(pairs, [documents[i].task for i in owners]), strict=True):
            answers[i].append(answer)
        for i in likely:
            results[i] = self._score_likelihoods(documents[i], answers[i])
        self._score_generations(documents, [i for i in range(len(documents)) if i not in answers], results)
        found = [r for r in results if r is not None]
        if broken := next((d for d, r in zip(documents, found, strict=True) if math.isnan(r.value)), None):
            raise NumericError(
                f"The metric of {broken.task!r} is NaN for its document {broken.id!r}; it must be a number."
            )
        return found

    def _score_likelihoods(self, document: Document, answers: list) -> DocumentScore:
        if document.kind == "text":
            total, tokens = answers[0].loglikelihood, answers[0].tokens
            per_word = (("word_perplexity", total / document.words),) if document.words else ()
            return DocumentScore(total / tokens, total, tokens, per_word)
        grader = self.graders[document.task]
        gold = answers[document.gold or 0]
        graded = grader.grade(document, [(a.loglikelihood, a.is_greedy) for a in answers])
        return _graded_score(grader, graded, gold.loglikelihood, gold.tokens)

    def _score_generations(
        self, documents: Sequence[Document], wanted: list[int], results: list[DocumentScore | None]
    ) -> None:
        groups: dict[tuple, list[int]] = {}
        for i in wanted:
            sampled = self.graders[documents[i].task].metric.startswith("pass@")
            how = self.sampling if sampled else GREEDY
            groups.setdefault((documents[i].until, documents[i].max_new_tokens, how), []).append(i)
        for (until, most, sampling), members in groups.items():
            texts = self.scorer.samples([documents[i].prompt for i in members], until, most, sampling)
            gold: dict[int, Any] = {}
            if self.gold:
                scored = self.scorer.score([self.scorer.gold_pair(documents[i]) for i in members])
                gold = dict(zip(members, scored, strict=True))
            for i, answers in zip(members, texts, strict=True):
                grader = self.graders[documents[i].task]
                likelihood, tokens = (gold[i].loglikelihood, gold[i].tokens) if gold else (float("nan"), 0)
                results[i] = _graded_score(grader, grader.grade(documents[i], answers), likelihood, tokens)


def _graded_score(grader: TaskGrader, graded: dict[str, float], likelihood: float, tokens: int) -> DocumentScore:
    """The reported figure, and the task's others beside it."""
    also = tuple((name, float(value)) for name, value in graded.items() if name != grader.metric)
    return DocumentScore(float(graded[grader.metric]), likelihood, tokens, also)
