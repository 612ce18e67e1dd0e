"""The result of ``freemoe eval``, and the document that it prints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from freemoe.results.common import ResultPart, SeenRecord
from freemoe.results.scores import ScoredDomain, ScoreRow, SecondaryScore


class EvaluatedDomain(ScoredDomain):
    """One domain of an evaluation."""

    set_aside: dict[str, Any] = Field(description="Documents that the artefact's making saw, and why.")
    rows: dict[str, ScoreRow] = Field(description="Per way to run it, score and paired difference to the first.")
    documents: list[dict[str, Any]] | None = Field(None, description="Every document; left out with --summary.")


class AverageScore(SecondaryScore):
    """Mean of several domains in one way of running."""

    domains: int


class EvaluatedRecord(SeenRecord):
    """The record of what the artefact's making saw; nothing more than that there is none, where none was kept."""

    known: bool
    seed: int = Field(description="Of the artefact's recipe: its splits were carved with it.")
    file: str = ""
    documents: int = 0
    hashes: dict[str, int] = Field({}, description="Hashes kept, by kind.")
    share_of_runs: float = Field(0.0, description="Share of a text's runs of tokens whose hashes are kept.")
    bytes: int = 0


class EvaluationCost(ResultPart):
    """How often the test documents of an evaluation were scored."""

    openings: int | None = Field(
        None, description="Runs of this user that scored these test documents; null: no ledger."
    )


class EvaluationResult(ResultPart):
    """What ``freemoe eval`` writes into ``result.json``."""

    format: Literal[1]
    kind: Literal["evaluation"]
    freemoe: str = Field(description="Version that wrote it.")
    created: str
    recipe: dict[str, Any]
    seen: EvaluatedRecord | None = Field(description="The record of what the making saw; null of a plain model.")
    domains: list[EvaluatedDomain]
    average: dict[str, AverageScore] = Field(
        {}, description="Mean of the domains that are scored in points, by way of running; of two or more."
    )
    costs: dict[str, dict[str, Any]] = Field(
        {}, description="Of a trimmed mixture: experts per token and parameters, by way."
    )
    environment: dict[str, Any]
    cost: EvaluationCost = EvaluationCost(openings=None)
