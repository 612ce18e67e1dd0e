"""What a task and a domain are: documents of two splits, and a grade for what a model answered. Neither holds a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from freemoe.evals.tasks.documents import Document, ReferenceSplit, ReportedSplit


@dataclass(frozen=True)
class TaskGrader:
    """The part of a task that a search may hold: it grades, and has no way to the reported documents.

    Text is not graded: its figure is its likelihood per token.
    """

    name: str
    metric: str
    grade: Callable[[Document, Sequence[Any]], dict[str, float]]


class EvalTask:
    """Documents of two splits, and their grading."""

    name: str  # Within its domain
    metric: str  # That is reported: a key of what `grade` returns; of text what its likelihood per token is called
    note: str  # One line: which split is reference, which is reported, what was carved or dropped
    lender: EvalTask | None = None  # Whose reference documents are borrowed
    chat = False  # Whether prompts are put by the model's chat template
    _reference: Sequence[Document] = ()
    _reported: Sequence[Document] = ()

    def reference(self) -> list[Document]:
        """Documents that may be searched, calibrated and trained on."""
        return list(self._reference)

    def reported(self) -> list[Document]:
        """Documents that are only reported on."""
        return list(self._reported)

    def grade(self, document: Document, responses: Sequence[Any]) -> dict[str, float]:
        """Metrics of one document alone; of text there are none.

        ``responses``: for ``choice`` and ``target`` of every entry of ``document.answers``, in their order, its log-likelihood
        in nats and whether greedy decoding gives it; for ``generate`` and ``code`` one or more completions.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class DomainData:
    """A domain: its name and its two splits, and in words how they were made."""

    name: str
    reference: ReferenceSplit
    reported: ReportedSplit
    # One line per task: which split is reference, which is reported, what was carved or dropped
    notes: tuple[str, ...] = ()
    graders: dict[str, TaskGrader] = field(default_factory=dict, repr=False)  # Graders by the name of their task
    chat: bool = False  # Whether prompts are put by the model's chat template


def grade_choice(
    document: Document, responses: Sequence[tuple[float, bool]], lengths: Sequence[int]
) -> dict[str, float]:
    """``acc``: is the likeliest answer the right one; ``acc_norm``: likeliest per character of the answer.

    ``document``: its ``gold`` is the index of the right answer. ``lengths``: characters of each answer, without the white
    space before it.
    """
    scores = [likelihood for likelihood, _ in responses]
    # The first of equals wins, as numpy's argmax and so lm-eval have it.
    best = max(range(len(scores)), key=lambda i: scores[i])
    per_character = [score / length for score, length in zip(scores, lengths, strict=True)]
    best_norm = max(range(len(scores)), key=lambda i: per_character[i])
    return {"acc": float(best == document.gold), "acc_norm": float(best_norm == document.gold)}
