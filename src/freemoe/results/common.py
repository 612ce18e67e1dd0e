"""The fields that every ``result.json`` has."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ResultPart(BaseModel):
    """A piece of a result: frozen, and nothing in it that has no name here."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class IntervalResult(ResultPart):
    """A figure with its 95 % interval; no ends where one document, one key or one round is all there is."""

    mean: float
    low: float | None
    high: float | None


class GuessingResult(ResultPart):
    """The base is no better than guessing on the documents that are reported."""

    unit: Literal["points", "perplexity"]
    score: float = Field(description="Of the base: per cent right on questions with choices, or perplexity.")
    low: float | None = Field(None, description="Of the 95 % interval of the score in per cent.")
    high: float | None = None
    guessing: float = Field(description="Per cent right by chance, or the size of the vocabulary.")
    documents: int | None = Field(None, description="Questions with choices.")


class SpeedAt(BaseModel):
    """Greedy requests of one prompt before a change and after it, in turns, batch 1.

    Beside, under the name of each side: median seconds to the first token (``ttft``) and between two further ones (``itl``).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    prompt: int = Field(description="Its tokens.")
    new_tokens: int = Field(17, description="Tokens of an answer.")
    rounds: int = Field(3, description="After one that warmed up.")
    prefill: IntervalResult | None = Field(None, description="How many times as fast to the first token, over rounds.")
    decode: IntervalResult | None = Field(None, description="How many times as fast between two further tokens.")


class SpeedResult(SpeedAt):
    """The first prompt's figures, and those of all."""

    lengths: list[SpeedAt] = []


class RunCost(BaseModel):
    """What a run took; systems tell more of it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    wall_seconds: float = Field(description="Of the last process; what was resumed is not in it.")
    peak_memory_bytes: int
    units_done: int = Field(description="Units of work done by the last process.")
    units_reused: int = Field(description="Units taken from the journal.")
    artefact_bytes: int | None = Field(None, description="Of experts and router on disk.")
    model_bytes: int | None = Field(None, description="Of a converted model on disk.")
    openings: int | None = Field(
        None, description="Runs of this user that scored these test documents, this one among them; null: no ledger."
    )


class SeenRecord(ResultPart):
    """The record of what the making saw, which is never scored as held out."""

    file: str
    documents: int
    hashes: dict[str, int] = Field(description="Hashes kept, by kind.")
    share_of_runs: float = Field(description="Share of a text's runs of tokens whose hashes are kept.")
    bytes: int


class RunResult(ResultPart):
    """The part of ``result.json`` that every run writes."""

    format: Literal[1]
    kind: str
    freemoe: str = Field(description="Version that wrote it.")
    created: str
    recipe: dict[str, Any]
    notes: list[str] = Field(
        [], description="What to mind in reading it: which settings a preset made smaller or larger."
    )
    seen: SeenRecord
    environment: dict[str, Any]
    cost: RunCost


class OpenDocument(ResultPart):
    """A document to which systems add keys of their own."""

    model_config = ConfigDict(extra="allow", frozen=True)


class MadeDocument(ResultPart):
    """What a command that makes an artefact prints with ``--json``."""

    folder: str = Field(description="The artefact.")
    report: str = Field(description="Its report.html.")
    headlines: list[str] = Field(description="The verdict, in lines for people.")
    result: RunResult | None = Field(None, description="As in the artefact's result.json; left out with --summary.")


class PlanDocument(OpenDocument):
    """A dry run. The last word of a key is the unit of its number: bytes, seconds, tokens, share (0 to 1)."""

    output: str | None = Field(None, description="What would be written.")
