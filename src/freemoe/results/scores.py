"""Scores of a domain, as builds and evaluations write them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from freemoe.results.common import GuessingResult, IntervalResult, ResultPart

ROWS = ("base", "expert", "routed", "control", "oracle")  # Rows of a build, in the order in which they are shown


class SecondaryScore(ResultPart):
    """Another figure of the same answers, such as acc_norm beside acc, or pass@10 beside pass@1."""

    score: float = Field(description="Per cent; of text, perplexity per word.")
    gain: IntervalResult = Field(description="Points over the base; of text, nats per word.")
    ratio: IntervalResult | None = Field(None, description="Perplexity over the base's; text only.")


class ScoreRow(ResultPart):
    """One row of a domain's table; what it is held against is the base's, on the same documents."""

    score: float = Field(description="Per cent right, or perplexity.")
    gain: IntervalResult = Field(description="Points; of text, nats per token.")
    ratio: IntervalResult | None = Field(None, description="Perplexity over the base's; text only.")
    documents: int
    clusters: int | None = Field(None, description="Independent ones among the documents: different content keys.")
    much_worse: float | None = Field(
        None, description="Share of documents that lost more than a nat per token; text only."
    )
    won: int | None = Field(None, description="Wrong under the base, right here; where every answer is right or wrong.")
    lost: int | None = None
    mcnemar_p: float | None = None
    p: float | None = Field(None, description="Two-sided, of the gain; of an evaluation.")
    holm: float | None = Field(None, description="p after Holm's correction over all rows of the evaluation.")
    over_control: IntervalResult | None = Field(
        None, description="The expert's gain over the control, document by document: points; of text, nats per token."
    )
    seeds: list[float] | None = Field(None, description="Gains of the controls' single draws.")
    also: dict[str, SecondaryScore] | None = Field(None, description="Other figures of the same answers, by name.")


class ScoredDomain(ResultPart):
    """What is told of a domain, in a build and in an evaluation."""

    name: str
    unit: Literal["points", "perplexity"]
    notes: list[str]
    rows: dict[str, ScoreRow]
    guessing: GuessingResult | None = Field(None, description="Only where the base is no better than guessing.")

    @property
    def is_text(self) -> bool:
        """Whether its figure is perplexity (lower is better) rather than points."""
        return self.unit == "perplexity"

    @property
    def labelled_rows(self) -> list[tuple[str, dict[str, ScoreRow]]]:
        """What a figure draws: a name and its rows; here of the domain as a whole."""
        return [(self.name, self.rows)]
