"""The result of ``freemoe build``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from freemoe.results.common import GuessingResult, IntervalResult, ResultPart, RunResult

KIND = "domain-experts"
"""In the manifest and the result of what ``freemoe build`` writes."""


class BaseFacts(ResultPart):
    """The base."""

    name: str
    revision: str | None
    origin: str | None = Field(description="What it was before it was loaded, e.g. a quantised GGUF.")
    fingerprint: str
    model_type: str
    dtype: str
    parameters: int
    weights: int = Field(description="Single weights that might be switched off.")
    layers: int


class SecondaryScore(ResultPart):
    """Another figure of the same answers, such as pass@10 beside pass@1."""

    score: float = Field(description="Per cent.")
    gain: IntervalResult = Field(description="Points over the base.")


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
    also: dict[str, SecondaryScore] | None = Field(
        None, description="Other figures of the same generated answers, by name."
    )


class VerdictResult(ResultPart):
    """What one metric's winner showed on the selection split."""

    metric: str
    candidate: str
    gain: float = Field(description="Mean gain on the documents that test it.")
    p: float = Field(description="One-sided; it counts the candidates that the winner was picked from.")
    tested: int
    much_worse: float = Field(0.0, description="Share of them that lost more than a nat per token.")
    holm: float | None = Field(description="p after Holm's correction over all tests of the build.")


class WhereOff(ResultPart):
    """Switched-off weights of one sublayer."""

    layer: int
    sublayer: str
    off: int
    of: int


class ForecastFacts(ResultPart):
    """What the base's gradient and curvature said of the candidate, and what it did; nats per token."""

    first_order: float
    disturbance: float
    measured: float


class SubdomainContents(ResultPart):
    """What a subdomain holds, by its reference documents."""

    prompts: list[str] = Field(description="Of the documents nearest to its centre, cut short.")
    words: list[str] = Field(description="Words that are more frequent in it than in the rest of its domain.")


class SubdomainResult(ResultPart):
    """One subdomain."""

    name: str
    reference_documents: int
    holds: SubdomainContents | None = None
    chosen: str = Field(description="The accepted candidate, or base.")
    verdict: str
    verdicts: list[VerdictResult]
    off: int
    off_share: float
    where_off: list[WhereOff]
    where_off_is: str
    purification_curve: list[float] = Field(description="Stopping loss, the base's first.")
    forecast: ForecastFacts | None = None
    bands: dict[str, tuple[str, float, float]] = Field(description="Candidate -> metric, start and end of the band.")
    rows: dict[str, ScoreRow]
    candidates: dict[str, float] = Field(
        description="Figure of every candidate on the reported documents: the oracle's."
    )
    oracle_candidate: str | None = None
    units: dict[str, Any] | None = Field(None, description="Curve, rivals, size and speed of units that are off.")


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


class DomainResult(ScoredDomain):
    """One domain."""

    metric: str
    by: str = Field(description="What its subdomains were made by.")
    reference_documents: int
    reported_documents: int
    router: dict[str, float | None]
    subdomains: list[SubdomainResult]
    documents: list[dict[str, Any]] = Field(
        description="Every reported document: its route, and its figure in every row."
    )

    @field_validator("rows")
    @classmethod
    def _has_a_base(cls, rows: dict[str, ScoreRow]) -> dict[str, ScoreRow]:
        """What every other row is compared with."""
        if "base" not in rows:
            raise ValueError("there is no base")
        return rows

    @property
    def accepted(self) -> list[SubdomainResult]:
        """Those of its subdomains whose expert is not the base."""
        return [s for s in self.subdomains if s.chosen != "base"]


class BuildResult(RunResult):
    """What ``freemoe build`` writes."""

    kind: Literal["domain-experts"]
    base: BaseFacts
    domains: list[DomainResult]
    overall: dict[str, Any] = Field(description="Mean over domains per row, with intervals.")
    router: dict[str, Any] = Field(description="On reference documents that the routing model did not see.")

    @field_validator("recipe")
    @classmethod
    def _has_sections(cls, recipe: dict[str, Any]) -> dict[str, Any]:
        """What the page reads of it."""
        for name in ("search", "router"):
            if not isinstance(recipe.get(name, {}), dict):
                raise ValueError(f"its {name} is {recipe[name]!r:.80}, and a mapping is needed")
        return recipe
