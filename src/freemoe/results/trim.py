"""The result of ``freemoe trim``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from freemoe.results.common import GuessingResult, ResultPart, RunResult, SpeedResult


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
    """What ``freemoe trim`` writes."""

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
