"""The rivals of switches: LoRA (PEFT) and full tuning, trained on the same documents, stopped by the same rule.

Every method sees the steps that `learned.draw_steps` makes of the gradient documents, looks at the stopping documents after
every ``every`` steps, ends after ``patience`` looks without a better loss, and keeps its best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.compat import with_lora_beside
from benchmarks.rivals.rival import Materials, Schedule, Terms
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_loss, mean_loss
from freemoe.domain_experts.purify.learned import draw_steps
from freemoe.models.precision import held_in
from freemoe.models.weights import WeightMatrix
from freemoe.training.descent import optimizer_step
from freemoe.training.loop import run_training_loop
from freemoe.training.states import BestCheckpoint


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
    best = BestCheckpoint({str(i): p for i, p in enumerate(parameters)})
    drawn = draw_steps(gradient, schedule.step_tokens, seed)

    def step(number: int) -> None:
        batches = next(drawn)
        tokens = sum(b.answer_tokens for b in batches)
        optimizer_step(optimizer, (answer_loss(model, b) / tokens for b in batches), number)

    def look(done: int) -> bool:
        return best.record_loss(mean_loss(model, stop)) >= schedule.patience

    run_training_loop(step, look, schedule.steps, schedule.every)
    best.restore_best()
    return best.losses


def with_lora(
    model: Any, weights: Sequence[WeightMatrix], rank: int, seed: int, *, lengths: bool = False
) -> tuple[Any, list[nn.Parameter]]:
    """Put PEFT's LoRA of one rank beside every one of ``weights``; returns the model and the new parameters.

    Scaling is 1 (``lora_alpha`` equal to the rank), so that the learning rate alone sets the pace. ``lengths`` makes it
    DoRA.
    """
    torch.manual_seed(seed)
    tuned = with_lora_beside(model, [w.name.removesuffix(".weight") for w in weights], rank, lengths=lengths)
    return tuned, [p for p in tuned.parameters() if p.requires_grad]


def train_lora(
    model: Any, materials: Materials, terms: Terms, *, lengths: bool = False
) -> tuple[Any, list[nn.Parameter], list[float]]:
    """Train a LoRA (or DoRA) on a model that is held in a number format meanwhile; the pairs themselves are fp32.

    Returns:
        The wrapped model, to be merged; the new parameters, at their best; the stopping losses, the base's first.
    """
    gradient, stop = materials.batches(materials.gradient), materials.batches(materials.stop)
    with held_in(model, getattr(torch, terms.number_format)):
        tuned, parameters = with_lora(model, materials.weights, terms.rank, terms.seed, lengths=lengths)
        try:
            losses = tune(tuned, parameters, gradient, stop, terms.rate, terms.schedule, terms.seed)
        except BaseException:
            tuned.unload()
            raise
    return tuned, parameters, losses
