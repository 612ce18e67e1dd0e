"""A table of scores that carries its split.

A `ScoreTable` belongs to a `ReferenceSplit` and is what search and choice read. Scores of reported documents have a
type of their own, `ReportedScores`, which neither accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from freemoe.core.errors import DataError, SplitError
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.summary import is_text
from freemoe.evals.tasks.documents import ReferenceSplit, require_reference
from freemoe.recipes.expert_names import BASE


class ReportedScores(tuple[DocumentScore, ...]):
    """Scores of reported documents: they may be printed, never chosen by."""


class ScoreTable:
    """Scores of candidates on the reference documents of one subdomain, computed when first asked for.

    ``compute``: ``(candidate, document numbers) -> scores``, journalled by its maker.
    """

    def __init__(self, split: ReferenceSplit, compute: Callable[[str, list[int]], list[DocumentScore]]) -> None:
        self.split = require_reference(split, "A table of scores to choose by")
        self._compute = compute
        self._scores: dict[str, dict[int, DocumentScore]] = {}

    @property
    def content_keys(self) -> list[str]:
        """Content key of every document."""
        return [d.key for d in self.split.documents]

    def document_scores(self, candidate: str, documents: Sequence[int]) -> list[DocumentScore]:
        """Scores of a candidate on some documents; only those not yet known are computed."""
        row = self._scores.setdefault(candidate, {})
        missing = [i for i in documents if i not in row]
        if missing:
            found = self._compute(candidate, missing)
            if isinstance(found, ReportedScores):
                raise SplitError("Scores of the reported split cannot choose an expert; score the reference split.")
            row.update(zip(missing, found, strict=True))
        return [row[i] for i in documents]

    def objective_values(self, candidate: str, documents: Sequence[int], objective: str = "accuracy") -> list[float]:
        """The objective on some documents, higher is better."""
        scores = self.document_scores(candidate, documents)
        if objective == "accuracy":
            return [s.value for s in scores]
        if any(s.loglikelihood != s.loglikelihood for s in scores):
            raise DataError(
                "The log-likelihood objective needs gold answers, and some documents have none. Use --objective accuracy."
            )
        return [s.loglikelihood / max(1, s.tokens) for s in scores]

    def token_weights(self, documents: Sequence[int]) -> list[float] | None:
        """Tokens of documents of text, by which their figure is weighed; None where every answer counts the same."""
        chosen = [self.split.documents[i] for i in documents]
        if not is_text(chosen):
            return None
        return [float(max(1, s.tokens)) for s in self.document_scores(BASE, documents)]

    def mean_objective(self, candidate: str, documents: Sequence[int], objective: str = "accuracy") -> float:
        """Weighted mean of the objective."""
        return float(
            np.average(self.objective_values(candidate, documents, objective), weights=self.token_weights(documents))
        )

    def mean_gain(self, candidate: str, documents: Sequence[int], objective: str = "accuracy") -> float:
        """Weighted mean of the paired differences to the base."""
        return float(
            np.average(self.paired_gains(candidate, documents, objective), weights=self.token_weights(documents))
        )

    def paired_gains(self, candidate: str, documents: Sequence[int], objective: str = "accuracy") -> list[float]:
        """Paired differences to the base on some documents."""
        mine = self.objective_values(candidate, documents, objective)
        base = self.objective_values(BASE, documents, objective)
        return [a - b for a, b in zip(mine, base, strict=True)]
