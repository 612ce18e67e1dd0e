"""Train what compensates for a plan, with everything else frozen (HookMoE Sec. 3.3, and where it is silent, ours).

``kd`` (default): KL from the same weights at full k. ``lm``: cross-entropy on the text, very likely the paper's own.
``state``: the last hidden state against the full model's. Layers below the lowest trained one run once; gradients exist
above it only; the kept result is the one with the best held-out loss.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import InitVar, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from freemoe.core.run.folder import RunFolder
from freemoe.core.run.progress import Progress, QuietProgress
from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.evals.engine.output_head import forward_blocks, forward_blocks_to_head, summed_in_chunks, summed_loss
from freemoe.hookmoe.hooks.teacher import TeacherLogits, kl_from_teacher
from freemoe.hookmoe.hooks.upper_half import checkpoint_layers, inputs_of, start_at_layer
from freemoe.hookmoe.measure import measure_quality
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.text.blocks import PackedBlocks
from freemoe.training.descent import optimizer_step, warm_cosine
from freemoe.training.loop import TrainingCheckpoints, run_training_loop
from freemoe.training.states import (
    BestCheckpoint,
    State,
    copy_into_parameters,
    load_optimizer,
    optimizer_state,
    pack_state,
    unpack_state,
)

LOSSES = ("kd", "lm", "state")
_WARMUP = 0.05


class TrainableCompensation(Protocol):
    """What can be trained to make up for a plan: hooks, and their rivals."""

    @property
    def lowest(self) -> int:
        """Lowest decoder layer that it changes."""
        ...

    def attached(self, model: Any) -> AbstractContextManager[None]:
        """Put it on a model while open."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained: every parameter with its name."""
        ...


@dataclass(frozen=True)
class TrainingSchedule:
    """How long and how fast hooks are trained."""

    loss: str = "kd"  # One of ``LOSSES``
    steps: int = 1000  # Optimiser steps
    rows: int = 8  # Rows of a step
    rate: float = 1e-3  # Highest learning rate: reached after a twentieth of the steps, then a cosine down to zero
    every: int = 100  # Steps between two looks at the held-out text
    seed: int = 0  # Of the order of rows
    checkpointing: bool = False  # Make activations again in the backward pass

    def row_order(self, rows: int) -> Tensor:
        """(steps, rows of a step) int64: which rows each step sees, every row once per pass."""
        generator = torch.Generator().manual_seed(self.seed)
        passes = math.ceil(self.steps * self.rows / rows)
        order = torch.cat([torch.randperm(rows, generator=generator) for _ in range(passes)])
        return order[: self.steps * self.rows].view(self.steps, self.rows)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return warm_cosine(self.rate, step, self.steps, max(1, round(self.steps * _WARMUP)))


@dataclass(frozen=True)
class TrainingData:
    """The text and the teacher that training reads."""

    train: PackedBlocks  # Blocks that give gradients
    train_teacher: TeacherLogits  # What the full model says on them
    held_out: PackedBlocks  # Blocks that say which step is kept
    held_out_teacher: TeacherLogits  # What the full model says on those


@contextmanager
def frozen_model(model: nn.Module) -> Iterator[None]:
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


def train_compensation(
    model: Any,
    plan: LayerPlan,
    compensation: TrainableCompensation,
    material: TrainingData,
    schedule: TrainingSchedule,
    *,
    rescale: str = "none",
    run: RunFolder | None = None,
    progress: Progress | None = None,
    name: str = "hooks",
) -> list[float]:
    """Train a compensation under a plan, in place, and leave it at its best held-out loss.

    Without a run no state is kept. Gives the held-out losses (KL; cross-entropy for ``lm``): before the first step, then
    one per look.

    Raises:
        NumericError: A loss is NaN or infinite.
    """
    parameters = dict(compensation.named_parameters())
    optimizer = torch.optim.Adam(parameters.values(), lr=schedule.rate, betas=(0.9, 0.95))
    order = schedule.row_order(len(material.train))
    best = BestCheckpoint(parameters)

    def to_state() -> State:
        return {**pack_state("now", parameters), **optimizer_state(optimizer), **best.to_state()}

    def load_state(state: State) -> None:
        copy_into_parameters(parameters, unpack_state("now", state))
        load_optimizer(optimizer, state)
        best.load_state(state)

    with frozen_model(model), (progress or QuietProgress()).stage(name, schedule.steps) as advance:
        fixed = run.unit_state(f"{name}, what is fixed") if run else NO_CHECKPOINT
        loss = _CompensationLoss(model, plan, compensation, material, schedule, rescale, fixed)

        def clip_gradients() -> None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)

        def train_step(number: int) -> None:
            # Closed at once whatever happens: each part holds the model as it trains.
            with closing(loss.iter_losses(order[number])) as parts:
                optimizer_step(optimizer, parts, number, rates=[schedule.rate_at(number)], change=clip_gradients)

        def eval_held_out(done: int) -> bool:
            best.record_loss(loss.held_out())
            return False

        checkpoints = TrainingCheckpoints(run, name, to_state, load_state) if run else None
        run_training_loop(
            train_step, eval_held_out, schedule.steps, schedule.every, checkpoints=checkpoints, advance=advance
        )
    best.restore_best()
    return best.losses


@dataclass(eq=False)
class _CompensationLoss:
    """The loss of some rows, with what does not change computed once."""

    model: Any
    plan: LayerPlan
    compensation: TrainableCompensation
    material: TrainingData
    schedule: TrainingSchedule
    rescale: str
    checkpoint: InitVar[UnitState]
    inputs: Tensor | None = None
    states: Tensor | None = None

    def __post_init__(self, checkpoint: UnitState) -> None:
        model, material, start = self.model, self.material, self.compensation.lowest
        with torch.no_grad():
            # At layer 0 the embeddings are as quick as the cache.
            if start:
                with apply_plan(model, self.plan, self.rescale):
                    self.inputs = inputs_of(model, material.train, start, checkpoint.part_state("inputs"))
            if self.schedule.loss == "state":
                parts = checkpoint.part_state("states").map_items(
                    material.train.iter_batches(), lambda batch: {"last": forward_blocks(model, batch).cpu()}
                )
                self.states = torch.cat([own["last"] for own in parts])

    def iter_losses(self, which: Tensor) -> Generator[Tensor, None, None]:
        """The mean loss of some rows as a sum, some rows at a time; the model stays as it trains until the next is asked for."""
        train = self.material.train
        tokens = int(train.select_rows(which).prediction_mask().sum())
        for some in which.split(train.rows_at_once):
            first = self.compensation.lowest if self.inputs is not None else 0
            with (
                start_at_layer(self.model, first),
                checkpoint_layers(self.model, first) if self.schedule.checkpointing else nullcontext(),
                apply_plan(self.model, self.plan, self.rescale),
                self.compensation.attached(self.model),
            ):
                yield (
                    self._state_loss(some) * (len(some) / len(which))
                    if self.schedule.loss == "state"
                    else (self._token_loss(some) / max(1, tokens))
                )

    def _model_inputs(self, which: Tensor) -> dict[str, Tensor]:
        return (
            {}
            if self.inputs is None
            else {"inputs_embeds": self.inputs[which].to(self.model.device, non_blocking=True)}
        )

    def _state_loss(self, which: Tensor) -> Tensor:
        assert self.states is not None
        mine = forward_blocks(self.model, self.material.train.select_rows(which), **self._model_inputs(which)).float()
        target = self.states[which].to(mine.device, non_blocking=True).float()
        return ((mine - target).square().sum(-1) / target.square().sum(-1)).mean()

    def _token_loss(self, which: Tensor) -> Tensor:
        """Sum over the predicted tokens."""
        batch = self.material.train.select_rows(which)
        places, wanted = batch.next_tokens(self.model.device)
        ending = forward_blocks_to_head(self.model, batch, places, **self._model_inputs(which))
        if self.schedule.loss == "lm":
            return summed_loss(ending, wanted)
        teacher = self.material.train_teacher[which][batch.prediction_mask()]
        return summed_in_chunks(ending, lambda rows, at: kl_from_teacher(teacher[at], ending.logits(rows)).sum())

    def held_out(self) -> float:
        with apply_plan(self.model, self.plan, self.rescale), self.compensation.attached(self.model):
            found = measure_quality(self.model, self.material.held_out, self.material.held_out_teacher)
        return found.mean_ce if self.schedule.loss == "lm" else found.mean_kl
