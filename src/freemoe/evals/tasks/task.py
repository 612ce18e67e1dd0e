"""What a task and a domain are: documents of two splits, and a grade for what a model answered. Neither holds a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from freemoe.core.errors import DataError
from freemoe.evals.tasks.documents import Document, ReferenceSplit, ReportedSplit

Likelihood = tuple[float, bool] | tuple[float, bool, int]
"""Log-likelihood of a continuation in nats, and whether greedy decoding gives it; third: its tokens."""

Response = Likelihood | str
"""What a model answered: a likelihood for each of the document's answers, or generated completions."""


@dataclass(frozen=True)
class TaskGrader:
    """The part of a task that a search may hold: it grades, and has no way to the reported documents."""

    name: str
    metric: str
    grade: Callable[[Document, Sequence[Response]], dict[str, float]]


class EvalTask:
    """Documents of two splits, and their grading."""

    name: str  # Within its domain
    metric: str  # That is reported: a key of what `grade` returns
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

    def grade(self, document: Document, responses: Sequence[Response]) -> dict[str, float]:
        """Metrics of one document alone.

        ``responses``: for ``choice``, ``target`` and ``text`` one likelihood per entry of ``document.answers``, in their
        order; for ``generate`` and ``code`` one or more completions.
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


def check_likelihoods(document: Document, responses: Sequence[Response]) -> list[tuple[float, ...]]:
    """Check that there is one likelihood per answer and return them."""
    found = [tuple(r) for r in responses if not isinstance(r, str)]
    if len(found) != len(document.answers) or len(found) != len(responses):
        raise DataError(
            f"{document.task} {document.id}: {len(responses)} responses for {len(document.answers)} "
            f"answers; a document of kind {document.kind!r} needs one (log-likelihood, is greedy) per "
            "answer."
        )
    return found


def per_token(document: Document, responses: Sequence[Response]) -> float:
    """Nats per scored token of a text, or of a response."""
    value, _, *rest = check_likelihoods(document, responses)[0]
    return -value / (rest[0] if rest else len(document.tokens) - document.given)


def check_completions(document: Document, responses: Sequence[Response]) -> list[str]:
    """Check that there is at least one completion and return them."""
    found = [r for r in responses if isinstance(r, str)]
    if not found or len(found) != len(responses):
        raise DataError(
            f"{document.task} {document.id}: a document of kind {document.kind!r} needs one or more "
            f"completions as text; got {[type(r).__name__ for r in responses]}."
        )
    return found


def grade_choice(document: Document, responses: Sequence[Response], lengths: Sequence[int]) -> dict[str, float]:
    """``acc``: is the likeliest answer the right one; ``acc_norm``: likeliest per character of the answer.

    ``document``: its ``gold`` is the index of the right answer. ``lengths``: characters of each answer, without the white
    space before it.
    """
    scores = [r[0] for r in check_likelihoods(document, responses)]
    # The first of equals wins, as numpy's argmax and so lm-eval have it.
    best = max(range(len(scores)), key=lambda i: scores[i])
    per_character = [score / length for score, length in zip(scores, lengths, strict=True)]
    best_norm = max(range(len(scores)), key=lambda i: per_character[i])
    return {"acc": float(best == document.gold), "acc_norm": float(best_norm == document.gold)}
