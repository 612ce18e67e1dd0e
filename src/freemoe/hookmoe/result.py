"""The result of ``freemoe trim``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from freemoe.results.common import GuessingResult, MadeDocument, PlanDocument, ResultPart, RunResult, SpeedResult


class MixtureFacts(ResultPart):
    """The mixture as it came."""

    name: str
    fingerprint: str
    family: str
    plan: str
    act: float = Field(description="Mean number of active experts per layer.")
    experts: list[int | None] = Field(description="Per layer; None where there is no mixture.")


class HookFacts(ResultPart):
    """The hooks, by the layer that they stand in."""

    widths: dict[str, int]
    residual_kl: dict[str, float]
    losses: dict[str, list[float]]
    start: dict[str, Any] = Field({}, description="How training began: held-out KL of each start, and the one kept.")


class TestPart(ResultPart):
    """The test part of the text."""

    tokens: int
    groups: int | None = Field(None, description="Groups (articles, rows) that intervals are over; blocks without it.")
    rows: dict[str, dict[str, Any]] = Field(
        description="Loss, divergence from the full model, perplexity over its own, use of experts; what was won back."
    )


class TrimResult(RunResult):
    """What ``freemoe trim`` writes into ``result.json``."""

    kind: Literal["trimmed-moe"]
    base: MixtureFacts
    plan: dict[str, Any] = Field(description="The plan, and how it was found.")
    rescale: dict[str, Any] = Field(description="The rule for router weights, and every rule on held-out text.")
    hooks: HookFacts
    cost_of_a_token: dict[str, Any]
    test: TestPart
    guessing: GuessingResult | None = Field(None, description="Only where the full mixture is no better than guessing.")
    speed: SpeedResult | None = Field(None, description="Full and trimmed; none where nothing was timed.")
    compared: list[dict[str, Any]] = Field(
        [], description="Plans and rules per token on the held-out part, without hooks."
    )
    text: dict[str, Any]


class TrimmedDocument(MadeDocument):
    """What ``freemoe trim --json`` prints."""

    plans: str | None = Field(description="Picture of the plans that were measured.")
    result: TrimResult | None = None


class TrimPlanDocument(PlanDocument):
    """What ``freemoe trim --dry-run --json`` prints."""

    base: str
    experts_per_token: str
    mean_experts_per_token: float
    plan: str | None = Field(description="The plan that is given; null where one is searched.")
    search: str | None
    parameters: int
    active_parameters: int
    least_active_parameters: int = Field(description="Under the given plan, or one expert in every layer.")
    hook_layers: str | list[int]
    hook_units: int
    hook_parameters: int
    text_blocks: dict[str, int]
    block_tokens: int
    plans_measured_at_most: int
    compared_plans: int = Field(description="Of --compare, sweeps spelled out.")
    steps: int
    step_blocks: int
    loss: str
    control: bool
    cached_inputs_bytes: int
    time_by_stage_seconds: dict[str, float] = Field(description="At most, about; what takes none is left out.")
    time_on_this_processor_seconds: float


DOCUMENTS = {"": TrimmedDocument, "-plan": TrimPlanDocument}
"""What the command prints with ``--json``, and what it prints of a dry run."""
