"""The result of ``freemoe build``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from freemoe.results.common import MadeDocument, PlanDocument, ResultPart, RunResult
from freemoe.results.scores import ScoredDomain, ScoreRow

KIND = "domain-experts"
"""In the manifest and the result of what ``freemoe build`` writes."""


class BaseFacts(ResultPart):
    """The base model that the experts are of: its name, fingerprint, type and size."""

    name: str
    revision: str | None
    origin: str | None = Field(description="What it was before it was loaded, e.g. a quantised GGUF.")
    fingerprint: str
    model_type: str
    dtype: str
    parameters: int
    weights: int = Field(description="Single weights that might be switched off.")
    layers: int


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

    first_order: float  # Sum of w * dL/dw: the gain of a linear loss
    disturbance: float  # Sum of w^2 h / 2: what the diagonal of the curvature takes off it
    measured: float  # The loss before less the loss after


class SubdomainContents(ResultPart):
    """What a subdomain holds, by its reference documents."""

    prompts: list[str] = Field(description="Of the documents nearest to its centre, cut short.")
    words: list[str] = Field(description="Words that are more frequent in it than in the rest of its domain.")


class SubdomainResult(ResultPart):
    """One subdomain: what was chosen for it, and what the significance test said of every candidate."""

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


class DomainResult(ScoredDomain):
    """One domain: its router, its subdomains and its scores on the test split."""

    metric: str
    by: str = Field(description="What its subdomains were made by.")
    reference_documents: int
    reported_documents: int
    tasks: dict[str, dict[str, ScoreRow]] = Field({}, description="Task -> its rows, of a domain of several tasks.")
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
    def labelled_rows(self) -> list[tuple[str, dict[str, ScoreRow]]]:
        """The domain as a whole, then its subdomains where there are several with reported documents."""
        parts = self.scored_subdomains
        return [(f"all of {self.name}" if parts else self.name, self.rows)] + (
            [(s.name, s.rows) for s in parts] if len(parts) > 1 else []
        )

    @property
    def scored_subdomains(self) -> list[SubdomainResult]:
        """Subdomains that have reported documents."""
        return [s for s in self.subdomains if "base" in s.rows]

    @property
    def abstentions(self) -> tuple[int, int]:
        """Documents on which the router abstained, and all."""
        return sum(d["routed_to"] == "base" for d in self.documents), len(self.documents)

    @property
    def accepted(self) -> list[SubdomainResult]:
        """Those of its subdomains whose expert is not the base."""
        return [s for s in self.subdomains if s.chosen != "base"]


class BuildResult(RunResult):
    """What ``freemoe build`` writes into ``result.json``."""

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


class BuiltDocument(MadeDocument):
    """``freemoe build`` and ``freemoe demo``."""

    result: BuildResult | None = None


class BuildPlanDocument(PlanDocument):
    """``freemoe build --dry-run`` and ``freemoe demo --dry-run``."""

    documents: dict[str, dict[str, int]] = Field(description="Per domain, those of the reference and reported split.")
    splits: list[str] = Field(description="Where they come from.")
    warnings: list[str] = Field(description="What the build would say before its first unit of work.")
    subdomains: int
    bands_per_subdomain: int
    candidate_bands: int
    purifications: int
    document_scores_to_search: int
    document_scores_to_report: int
    workers: int
    memory_bytes: int = Field(description="Of all processes at the largest moment, beside the libraries.")
    base_bytes: int
    above_the_base_bytes: dict[str, int] = Field(description="The largest moment of every stage.")
    fits: str
    time_of_one_document_seconds: float = Field(description="Measured on one batch.")
    time_by_stage_seconds: dict[str, float] = Field(description="By one worker, about; what takes none is left out.")
    time_of_one_worker_seconds: float = Field(description="Of the whole build by one worker, about.")


DOCUMENTS = {"": BuiltDocument, "-plan": BuildPlanDocument}
"""What the command prints with ``--json``, and what it prints of a dry run."""
