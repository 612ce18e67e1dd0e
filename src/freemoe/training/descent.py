"""A step of an optimizer, and its pace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from freemoe.core.errors import NumericError


def cosine_decay(step: int, steps: int, floor: float = 0.0) -> float:
    """The share of the rate at a step: from one at step 0 down half a cosine to ``floor`` at step ``steps``."""
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))


def warm_cosine(rate: float, step: int, steps: int, warm: int) -> float:
    """The rate of a step: up a line to ``rate`` at the last of ``warm`` steps, then down half a cosine to zero."""
    return rate * (step + 1) / warm if step < warm else rate * cosine_decay(step - warm, steps - warm)


def check_finite(loss: float, step: int, about: Callable[[], str] = str) -> None:
    """Stop at a loss that is no number. ``about`` says more, after the loss.

    Raises:
        NumericError: It is NaN or infinite; says in which step.
    """
    if not math.isfinite(loss):
        raise NumericError(
            f"The loss of step {step} is {loss}{about()}. Nothing of this step was kept. Lower the learning rate, or "
            "use float32."
        )


def optimizer_step(
    optimizer: torch.optim.Optimizer,  # Of what is trained
    # () each, best made one after the other: each one's graph is gone before the next is asked for
    losses: Iterable[Tensor],
    step: int,  # Its number, for the message
    *,
    rates: Sequence[float] | None = None,  # Learning rates of the optimizer's groups; None: as they are
    # Changes the gradients before they are used: clips them, or averages them over processes
    change: Callable[[], object] | None = None,
) -> None:
    """One step of an optimizer down the sum of some losses.

    Raises:
        NumericError: A loss is NaN or infinite; neither the parameters nor the optimizer have changed.
    """
    optimizer.zero_grad(set_to_none=True)
    values = []
    for loss in losses:
        loss.backward()
        values.append(loss.detach())
        # What its graph still holds must not stand beside the next one's.
        del loss
    # All at once: a host that waited for each would leave its device idle.
    for value in torch.stack(values).tolist():
        check_finite(value, step)
    if change is not None:
        change()
    if rates is not None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    optimizer.step()
