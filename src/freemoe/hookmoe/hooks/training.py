"""Train what compensates for a plan, with everything else frozen (HookMoE Sec. 3.4, and where it is silent, ours).

``kd`` (default): KL from the same weights at full k. ``lm``: cross-entropy on the text, very likely the paper's own.
``state``: the last hidden state against the full model's. Layers below the lowest trained one run once; gradients exist
above it only; the kept result is the one with the best held-out loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freemoe.core.run.progress import Progress, Quiet
from freemoe.hookmoe.hooks.teacher import Teacher, divergence, logits_of
from freemoe.hookmoe.hooks.upper_half import inputs_of, upper
from freemoe.hookmoe.measure import measure
from freemoe.hookmoe.plans.apply import applied
from freemoe.hookmoe.plans.plan import Plan
from freemoe.text.blocks import Blocks
from freemoe.training.descent import descend, warm_cosine
from freemoe.training.loop import Kept, Store
from freemoe.training.loop import train as run
from freemoe.training.states import Best, State, load_optimizer, optimizer_state, packed, put, unpacked

LOSSES = ("kd", "lm", "state")
_WARMUP = 0.05


class Compensation(Protocol):
    """What can be trained to make up for a plan: hooks, and their rivals."""

    @property
    def lowest(self) -> int:
        """Lowest decoder layer that it changes."""
        ...

    def attached(self, model: Any) -> AbstractContextManager[None]:
        """Put it on a model while open."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained."""
        ...


@dataclass(frozen=True)
class Schedule:
    """How training goes.

    Attributes:
        loss: One of ``LOSSES``.
        steps: Optimiser steps.
        rows: Rows of a step.
        rate: Highest learning rate: reached after a twentieth of the steps, then a cosine down to zero.
        every: Steps between two looks at the held-out text.
        seed: Of the order of rows.
    """

    loss: str = "kd"
    steps: int = 1000
    rows: int = 8
    rate: float = 1e-3
    every: int = 100
    seed: int = 0

    def order(self, rows: int) -> Tensor:
        """(steps, rows of a step) int64: which rows each step sees, every row once per pass."""
        generator = torch.Generator().manual_seed(self.seed)
        passes = math.ceil(self.steps * self.rows / rows)
        order = torch.cat([torch.randperm(rows, generator=generator) for _ in range(passes)])
        return order[: self.steps * self.rows].view(self.steps, self.rows)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return warm_cosine(self.rate, step, self.steps, max(1, round(self.steps * _WARMUP)))


@dataclass(frozen=True)
class Material:
    """What training reads.

    Attributes:
        train: Blocks that give gradients.
        train_teacher: What the full model says on them.
        held_out: Blocks that say which step is kept.
        held_out_teacher: What the full model says on those.
    """

    train: Blocks
    train_teacher: Teacher
    held_out: Blocks
    held_out_teacher: Teacher


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """While open, no parameter of the model takes a gradient, and it is in evaluation mode."""
    # In training mode some routers add noise to their input in place.
    training, asked = model.training, [(p, p.requires_grad) for p in model.parameters()]
    model.eval()
    for p, _ in asked:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p, wanted in asked:
            p.requires_grad_(wanted)
        model.train(training)


def train(
    model: Any,
    plan: Plan,
    compensation: Compensation,
    material: Material,
    schedule: Schedule,
    *,
    rescale: str = "none",
    store: Store | None = None,
    progress: Progress | None = None,
    name: str = "hooks",
) -> list[float]:
    """Train a compensation under a plan, in place, and leave it at its best held-out loss.

    Args:
        model: The mixture model; bit-equal afterwards.
        plan: Experts per layer while training.
        compensation: What is trained.
        material: Text and teacher.
        schedule: How.
        rescale: See `applied`.
        store: Keeps the state before every look; None: nothing is kept.
        progress: Where to report.
        name: Of the stage and of the states.

    Returns:
        Held-out losses (KL; cross-entropy for ``lm``): before the first step, then one per look.

    Raises:
        NumericError: A loss is NaN or infinite.
    """
    parameters = dict(compensation.named_parameters())
    optimizer = torch.optim.Adam(parameters.values(), lr=schedule.rate, betas=(0.9, 0.95))
    order = schedule.order(len(material.train))
    best = Best(parameters)

    def state() -> State:
        return {**packed("now", parameters), **optimizer_state(optimizer), **best.state()}

    def load(state: State) -> None:
        put(parameters, unpacked("now", state))
        load_optimizer(optimizer, state)
        best.load(state)

    with frozen(model), (progress or Quiet()).stage(name, schedule.steps) as advance:
        loss = _Loss(model, plan, compensation, material, schedule.loss, rescale)

        def clip() -> None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)

        def step(number: int) -> None:
            rows = map(loss, [order[number]])
            descend(optimizer, rows, number, rates=[schedule.rate_at(number)], change=clip)

        def look(done: int) -> bool:
            best.look(loss.held_out())
            return False

        kept = Kept(store, name, state, load) if store else None
        run(step, look, schedule.steps, schedule.every, kept=kept, advance=advance)
    best.restore()
    return best.losses


class _Loss:
    """The loss of some rows, with what does not change computed once."""

    def __init__(
        self, model: Any, plan: Plan, compensation: Compensation, material: Material, kind: str, rescale: str
    ) -> None:
        self.model, self.plan, self.compensation = model, plan, compensation
        self.material, self.kind, self.rescale = material, kind, rescale
        self.start = compensation.lowest
        with torch.no_grad():
            # At layer 0 the embeddings are as quick as the cache.
            self.inputs = self._inputs() if self.start else None
            self.states = self._states() if kind == "state" else None

    def _inputs(self) -> Tensor:
        with applied(self.model, self.plan, self.rescale):
            return inputs_of(self.model, self.material.train, self.start)

    def _states(self) -> Tensor:
        parts = [_last_state(self.model, batch) for batch in self.material.train.batches(8)]
        return torch.cat([p.cpu() for p in parts])

    def __call__(self, which: Tensor) -> Tensor:
        batch = self.material.train.rows(which)
        device = self.model.device
        given = {}
        if self.inputs is not None:
            given["inputs_embeds"] = self.inputs[which].to(device)
        counted = batch.predicted().to(device)
        with (
            upper(self.model, self.start if self.inputs is not None else 0),
            applied(self.model, self.plan, self.rescale),
            self.compensation.attached(self.model),
        ):
            if self.states is not None:
                target = self.states[which].to(device).float()
                mine = _last_state(self.model, batch, **given).float()
                return ((mine - target).square().sum(-1) / target.square().sum(-1)).mean()
            logits = logits_of(self.model, batch, **given)[:, :-1]
        if self.kind == "kd":
            return divergence(self.material.train_teacher.rows(which), logits)[counted].mean()
        target = batch.ids[:, 1:].to(device)
        return F.cross_entropy(logits.float()[counted], target[counted])

    def held_out(self) -> float:
        with applied(self.model, self.plan, self.rescale), self.compensation.attached(self.model):
            found = measure(self.model, self.material.held_out, self.material.held_out_teacher)
        return found.mean_ce if self.kind == "lm" else found.mean_kl


def _last_state(model: Any, batch: Blocks, **given: Tensor) -> Tensor:
    """(rows, length, h): the state that the head reads."""
    inputs = given or {"input_ids": batch.ids.to(model.device)}
    out = model.base_model(**inputs, position_ids=batch.positions.to(model.device), use_cache=False)
    return out.last_hidden_state
