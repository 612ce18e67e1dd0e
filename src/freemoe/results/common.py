"""What every ``result.json`` has, and how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from freemoe.core.errors import ArtifactError
from freemoe.core.run.execute import RESULT_FORMAT
from freemoe.core.untrusted import read_json


class Part(BaseModel):
    """A piece of a result: frozen, and nothing in it that has no name here."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(Part):
    """A figure with its 95 % interval; no ends where one document or one key is all there is."""

    mean: float
    low: float | None
    high: float | None


class Guessing(Part):
    """The base is no better than guessing on the documents that are reported."""

    unit: Literal["points", "perplexity"]
    score: float = Field(description="Of the base: per cent right on questions with choices, or perplexity.")
    low: float | None = Field(None, description="Of the 95 % interval of the score in per cent.")
    high: float | None = None
    guessing: float = Field(description="Per cent right by chance, or the size of the vocabulary.")
    documents: int | None = Field(None, description="Questions with choices.")


class TimesAsFast(Part):
    """How many times as fast a model is, with its 95 % interval over rounds; no ends where there was one round."""

    mean: float
    low: float | None
    high: float | None


class SpeedAt(BaseModel):
    """Greedy requests of one prompt before a change and after it, in turns, batch 1.

    Beside, under the name of each side: median seconds to the first token (``ttft``) and between two further ones (``itl``).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    prompt: int = Field(description="Its tokens.")
    new_tokens: int = Field(17, description="Tokens of an answer.")
    rounds: int = Field(3, description="After one that warmed up.")
    prefill: TimesAsFast | None = Field(None, description="To the first token.")
    decode: TimesAsFast | None = Field(None, description="Between two further tokens.")


class Speed(SpeedAt):
    """The first prompt's figures, and those of all."""

    lengths: list[SpeedAt] = []


class Cost(BaseModel):
    """What a run took; systems tell more of it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    wall_seconds: float = Field(description="Of the last process; what was resumed is not in it.")
    peak_memory_bytes: int
    units_done: int = Field(description="Units of work done by the last process.")
    units_reused: int = Field(description="Units taken from the journal.")
    openings: int | None = Field(
        None, description="Runs of this user that scored these test documents, this one among them; null: no ledger."
    )


class SeenRecord(Part):
    """The record of what the making saw, which is never scored as held out."""

    file: str
    documents: int
    hashes: dict[str, int] = Field(description="Hashes kept, by kind.")
    share_of_runs: float = Field(description="Share of a text's runs of tokens whose hashes are kept.")
    bytes: int


class Result(Part):
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
    cost: Cost


def read_result(folder: str | Path) -> dict[str, Any]:
    """The ``result.json`` of a folder, or that file itself, as plain data.

    Raises:
        ArtifactError: There is none, it is damaged, or a newer freemoe wrote it.
    """
    path = Path(folder)
    path = path if path.suffix == ".json" and not path.is_dir() else path / "result.json"
    if not path.is_file():
        near = path.parent.parent / f"{path.parent.name}.partial"
        hint = f" An unfinished run stands at {str(near)!r}: run its command again first." if near.exists() else ""
        raise ArtifactError(f"{str(path)!r} is not a file; the folder of a finished run is needed.{hint}")
    try:
        found = read_json(path, ArtifactError, finite=False)
    except ArtifactError as error:
        raise ArtifactError(f"{str(path)!r} is damaged: {error} Copy the artefact again or make it anew.") from None
    if not isinstance(found, dict):
        raise ArtifactError(
            f"{str(path)!r}: a result is a mapping, got {type(found).__name__}. Make the artefact anew."
        )
    written = found.get("format")
    if isinstance(written, int) and written > RESULT_FORMAT:
        raise ArtifactError(
            f"{str(path)!r} is of format {written}, and this freemoe reads up to {RESULT_FORMAT}. Install the freemoe that "
            f"wrote it ({found.get('freemoe', 'unknown')})."
        )
    return found
