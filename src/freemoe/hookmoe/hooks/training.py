"""Train what compensates for a plan, with everything else frozen (HookMoE Sec. 3.4, and where it is silent, ours).

``kd`` (default): KL from the same weights at full k. ``lm``: cross-entropy on the text, very likely the paper's own.
``state``: the last hidden state against the full model's. Layers below the lowest trained one run once; gradients exist
above it only; the kept result is the one with the best held-out loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freemoe.core.errors import NumericError
from freemoe.core.run.progress import Progress, Quiet
from freemoe.hookmoe.hooks.teacher import Teacher, divergence, logits_of
from freemoe.hookmoe.hooks.upper_half import inputs_of, upper
from freemoe.hookmoe.measure import measure
from freemoe.hookmoe.plans.apply import applied
from freemoe.hookmoe.plans.plan import Plan
from freemoe.text.blocks import Blocks

LOSSES = ("kd", "lm", "state")
_WARMUP = 0.05

State = dict[str, Tensor]


class Store(Protocol):
    """Where states of a training are kept, so that a killed run goes on."""

    def has(self, name: str) -> bool:
        """Whether a state is kept."""
        ...

    def keep(self, name: str, work: Callable[[], State]) -> State:
        """The state of that name; made by ``work`` where it is not kept yet."""
        ...

    def drop(self, name: str) -> None:
        """Forget a state that a later one replaces."""
        ...


class NoStore:
    """Keeps nothing."""

    def has(self, name: str) -> bool:
        """Never."""
        return False

    def keep(self, name: str, work: Callable[[], State]) -> State:
        """Always does the work."""
        return work()

    def drop(self, name: str) -> None:
        """Does nothing."""


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
        warm = max(1, round(self.steps * _WARMUP))
        if step < warm:
            return self.rate * (step + 1) / warm
        return self.rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


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
        store: Keeps the state after every look.
        progress: Where to report.
        name: Of the stage and of the states.

    Returns:
        Held-out losses (KL; cross-entropy for ``lm``): before the first step, then one per look.

    Raises:
        NumericError: A loss is NaN or infinite.
    """
    store = store or NoStore()
    parameters = dict(compensation.named_parameters())
    optimizer = torch.optim.Adam(parameters.values(), lr=schedule.rate, betas=(0.9, 0.95))
    order = schedule.order(len(material.train))
    ends = [*range(0, schedule.steps, schedule.every), schedule.steps]
    first = max((i for i, end in enumerate(ends) if store.has(f"{name}|{end}")), default=0)
    state: State = {}
    with frozen(model), (progress or Quiet()).stage(name, schedule.steps) as advance:
        advance(ends[first])
        loss = _Loss(model, plan, compensation, material, schedule.loss, rescale)
        for number in range(first, len(ends)):

            def work(number: int = number, earlier: State = state) -> State:
                for step in range(ends[number - 1] if number else 0, ends[number]):
                    for group in optimizer.param_groups:
                        group["lr"] = schedule.rate_at(step)
                    optimizer.zero_grad(set_to_none=True)
                    value = loss(order[step])
                    if not bool(torch.isfinite(value)):
                        raise NumericError(
                            f"{name}: the loss is {float(value)} at step {step}; lower the learning rate."
                        )
                    value.backward()
                    torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
                    optimizer.step()
                    advance(1)
                return _state(parameters, optimizer, loss.held_out(), earlier)

            state = store.keep(f"{name}|{ends[number]}", work)
            _load(state, parameters, optimizer)
            if number:
                store.drop(f"{name}|{ends[number - 1]}")
    with torch.no_grad():
        for key, p in parameters.items():
            p.copy_(state[f"best.{key}"])
    return state["losses"].tolist()


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


def _state(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Adam, loss: float, earlier: State) -> State:
    """Everything that a resumed run needs: values, Adam's moments, the best values so far, held-out losses."""
    state: State = {}
    losses = [*(earlier["losses"].tolist() if earlier else []), loss]
    best = losses[-1] <= min(losses)
    for key, p in parameters.items():
        state[f"now.{key}"] = p.detach().clone()
        state[f"best.{key}"] = p.detach().clone() if best else earlier[f"best.{key}"]
        for moment, value in optimizer.state.get(p, {}).items():
            state[f"{moment}.{key}"] = torch.as_tensor(value).clone()
    state["losses"] = torch.tensor(losses, dtype=torch.float64)
    return state


@torch.no_grad()
def _load(state: State, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Adam) -> None:
    for key, p in parameters.items():
        p.copy_(state[f"now.{key}"])
        if f"step.{key}" in state:
            moments = ("step", "exp_avg", "exp_avg_sq")
            device = {m: torch.device("cpu") if m == "step" else p.device for m in moments}
            optimizer.state[p] = {m: state[f"{m}.{key}"].clone().to(device[m]) for m in moments}
