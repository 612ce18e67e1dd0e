"""The rivals of switches: LoRA (PEFT) and full tuning, trained on the same documents, stopped by the same rule.

Every method sees the steps that `learned.draw` makes of the gradient documents, looks at the stopping documents after
every ``every`` steps, ends after ``patience`` looks without a better loss, and keeps its best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.compat.peft import with_lora_beside
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_loss, mean_loss
from freemoe.domain_experts.purify.learned import draw
from freemoe.models.weights import Weight


@dataclass(frozen=True)
class Schedule:
    """How long a method may train, and when it stops.

    Attributes:
        steps: Most steps.
        step_tokens: Answer tokens of a step, about.
        every: Steps between two looks at the stopping loss.
        patience: Looks without a better loss before the end.
    """

    steps: int = 600
    step_tokens: int = 2048
    every: int = 50
    patience: int = 6


def tune(
    model: Any,
    parameters: Sequence[nn.Parameter],
    gradient: Sequence[AnswerBatch],
    stop: Sequence[AnswerBatch],
    rate: float,
    schedule: Schedule,
    seed: int,
) -> list[float]:
    """Train ``parameters`` with Adam, in place, and leave them at the best stopping loss seen.

    Returns:
        The stopping losses: the base's, then one per look.
    """
    for p in model.parameters():
        p.requires_grad_(False)
    for p in parameters:
        p.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters, lr=rate)
    losses = [mean_loss(model, stop)]
    best, kept = 0, _copies(parameters)
    steps = draw(gradient, schedule.step_tokens, seed)
    for step in range(1, schedule.steps + 1):
        batches = next(steps)
        tokens = sum(b.answer_tokens for b in batches)
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            (answer_loss(model, batch) / tokens).backward()
        optimizer.step()
        if step % schedule.every and step < schedule.steps:
            continue
        losses.append(mean_loss(model, stop))
        if losses[-1] < losses[best]:
            best, kept = len(losses) - 1, _copies(parameters)
        if len(losses) - 1 - best >= schedule.patience:
            break
    with torch.no_grad():
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)
    return losses


def _copies(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


def with_lora(model: Any, weights: Sequence[Weight], rank: int, seed: int) -> tuple[Any, list[nn.Parameter]]:
    """Put PEFT's LoRA of one rank beside every one of ``weights``; returns the model and the new parameters.

    Scaling is 1 (``lora_alpha`` equal to the rank), so that the learning rate alone sets the pace.
    """
    torch.manual_seed(seed)
    tuned = with_lora_beside(model, [w.name.removesuffix(".weight") for w in weights], rank)
    return tuned, [p for p in tuned.parameters() if p.requires_grad]
