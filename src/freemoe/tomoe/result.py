"""The result of ``freemoe convert``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from freemoe.results.common import GuessingResult, MadeDocument, PlanDocument, ResultPart, RunResult, SpeedResult

KIND = "converted"
"""Of the artefact, as its manifest has it."""


class DenseFacts(ResultPart):
    """The dense base model that was converted."""

    name: str
    fingerprint: str
    model_type: str


class BlockCounts(ResultPart):
    """Tokens of the text's parts, in blocks of a length."""

    length: int
    train: int
    held_out: int
    test: int
    test_groups: list[int] | None = Field(
        None, description="Group (article, row) of every block of the test part; without it intervals are over blocks."
    )


class MissedBudget(ResultPart):
    """The active share that was asked for, and what a token of the conversion uses."""

    asked: float
    got: float


class LayerFacts(ResultPart):
    """The widths that the conversion left in one layer."""

    query_dims: int
    value_dims: int
    head_dim: int
    head_share: float = Field(1.0, description="Heads that stay, of all.")
    widths: list[int] = Field(description="Neurons of every expert.")
    union: int = Field(description="Neurons that any expert has.")
    width: int = Field(description="Neurons of the dense layer.")


class ConvertResult(RunResult):
    """What ``freemoe convert`` writes into ``result.json``."""

    kind: Literal["converted"]
    base: DenseFacts
    blocks: BlockCounts
    parameters: dict[str, Any] = Field(description="Of linears and in all, dense and active, nominal and at run time.")
    missed_budget: MissedBudget | None = Field(
        None, description="Only where a token uses more than was asked for, or 0.01 less."
    )
    guessing: GuessingResult | None = Field(None, description="Only where the dense model is no better than guessing.")
    layers: list[LayerFacts]
    usage: list[list[float]] = Field(description="Per layer, the share of tokens that every expert is given.")
    scores: dict[str, dict[str, Any]] = Field(
        description="Dense, converted and every rival on the test part, block by block."
    )
    speed: SpeedResult | None = Field(None, description="Dense and converted; none where nothing was timed.")
    rivals: dict[str, dict[str, float]] = Field(description="The variant of every rival that held-out text chose.")
    history: dict[str, Any] = Field(description="Columns and rows of the training.")
    held_out_curve: list[dict[str, float]]


class ConvertedDocument(MadeDocument):
    """What ``freemoe convert --json`` prints."""

    result: ConvertResult | None = None


class ConvertPlanDocument(PlanDocument):
    """What ``freemoe convert --dry-run --json`` prints."""

    text_tokens: dict[str, int]
    block_tokens: int
    steps: int
    step_tokens: int
    passes_over_the_text: float
    weights_of_linears: int
    active_weights_of_linears: int
    active_share: float
    trained_numbers: int
    training_bytes: int = Field(description="Of the trained numbers, their gradients and Adam's moments.")
    time_by_stage_seconds: dict[str, float] = Field(description="About; what takes none is left out.")
    time_on_this_processor_seconds: float


DOCUMENTS = {"": ConvertedDocument, "-plan": ConvertPlanDocument}
"""What the command prints with ``--json``, and what it prints of a dry run."""
