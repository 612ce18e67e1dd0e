"""Training which units are off: straight-through scores, an exact budget, the stopping loss as judge.

Every unit has a score; the K lowest are off. The gradient of the loss by the mask passes the choice as if it were the
identity, so that units that are off are judged too and can come back. A run opens one budget after the other, each from
where the last one ended, so that one training gives the curve of loss against share off.

Gradients mislead where units carry massive activations. So the stopping loss picks the order that training starts from,
the most disturbing units are held on, and after every look the scores go back to those of the look before, and move half
as fast from there, when those do better at the same number of units off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import DataError, NumericError
from freemoe.domain_experts.purify.batches import AnswerBatch, mean_loss
from freemoe.domain_experts.purify.gradients import Checkpointing, backward, gradients_to
from freemoe.domain_experts.purify.greedy import PurifyTask
from freemoe.domain_experts.purify.learned import draw_steps
from freemoe.domain_experts.recipe import UnitSection
from freemoe.domain_experts.structured.masks import apply_masks, masks_of, units_off
from freemoe.domain_experts.structured.ranking import UnitImportance, measure_importance, unit_orders
from freemoe.domain_experts.structured.units import ModelUnits, lowest_units, numbers_off
from freemoe.training.descent import cosine_decay
from freemoe.training.states import State, unpack_state

_BETAS = (0.9, 0.99)
# The budget of a stage opens over its first part.
_OPEN = 0.25
# How far a score moves per step.
_PACE = 0.3
# Scores start evenly in [-_SPREAD, _SPREAD]. The share _HELD of the units that disturbs most begins _FAR above.
_SPREAD, _HELD, _FAR = 3.0, 0.01, 1e3


@dataclass(frozen=True, eq=False)
class CurvePoint:
    """Where the training of one budget ended."""

    share: float  # Units off, as a share of all: what was asked for, rounded as the layout needs it
    requested: float  # The share that was asked for
    off: dict[int, Tensor]  # Which units are off
    loss: float  # Loss on the stopping documents, in nats per answer token


@dataclass(frozen=True, eq=False)
class PruningCurve:
    """What one training over all budgets found."""

    base: float  # Stopping loss with every unit on
    points: tuple[CurvePoint, ...]  # One per budget, ascending
    looks: tuple[tuple[int, float, float], ...] = ()  # (step, share off, stopping loss) of every look
    start: str = ""  # The order that training began with: a name of `ranking.unit_orders`


@dataclass(eq=False)
class UnitScores:
    """Scores of all units and Adam's two means of their gradients, (count,) per layer, fp32."""

    values: list[Tensor]
    mean: list[Tensor]
    square: list[Tensor]
    steps: int = 0

    @staticmethod
    def from_order(order: Sequence[Tensor], worths: Sequence[UnitImportance]) -> UnitScores:
        """Begin with the ranks of an order, evenly spread, and hold the units that disturb most far above the others."""
        sizes = [len(v) for v in order]
        flat = torch.cat(list(order))
        ranks = torch.empty_like(flat)
        ranks[torch.sort(flat, stable=True).indices] = torch.linspace(-_SPREAD, _SPREAD, len(flat), device=flat.device)
        curvature = torch.cat([w.curvature for w in worths])
        ranks[torch.topk(curvature, int(_HELD * len(flat))).indices] += _FAR
        values = list(ranks.split(sizes))
        return UnitScores(values, [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values])

    def with_fresh_moments(self) -> UnitScores:
        """The same scores, with means that begin anew."""
        values = [v.clone() for v in self.values]
        return UnitScores(values, [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values])

    def to_state(self, part: str) -> State:
        """As a part of a state."""
        lists = {"values": self.values, "mean": self.mean, "square": self.square}
        found = {f"{part}|{name}|{n}": t for name, own in lists.items() for n, t in enumerate(own)}
        return {**found, f"{part}|steps": torch.tensor(self.steps)}

    @staticmethod
    def from_state(state: State, device: torch.device) -> UnitScores:
        """Inverse of `state`, of what `unpack_state` gives."""
        number = sum(name.startswith("values|") for name in state)
        lists = ([state[f"{name}|{n}"].to(device) for n in range(number)] for name in ("values", "mean", "square"))
        return UnitScores(*lists, steps=int(state["steps"]))

    def adam_step(self, gradients: Sequence[Tensor], pace: float) -> None:
        """One step of Adam down ``gradients``, with one floor for all units: large gradients move further."""
        first, second = _BETAS
        self.steps += 1
        for mean, square, gradient in zip(self.mean, self.square, gradients, strict=True):
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient * gradient, 1 - second)
        unbias = 1 - second**self.steps
        floor = float(torch.cat(self.square).mean().div(unbias).sqrt())
        if floor == 0:
            return
        for value, mean, square in zip(self.values, self.mean, self.square, strict=True):
            # The mask is 1 where the score is high, so that going down the loss is going down dL/dm.
            value.addcdiv_(mean, (square / unbias).sqrt_().add_(floor), value=-pace / (1 - first**self.steps))


def train_units(
    task: PurifyTask,
    units: ModelUnits,
    section: UnitSection,
    *,
    multiple: int = 8,
    checkpointing: Checkpointing = "auto",
) -> PruningCurve:
    """Find the units to switch off for one subdomain; the model is bit-equal afterwards.

    The task is told after every look: steps done, loss, share of the units off. With the layout ``even``, the units left in
    a layer are a multiple of ``multiple``.

    Raises:
        DataError: When there are no documents for gradients, or none for stopping.
        RecipeError: Shares that the layout cannot keep.
        NumericError: When a loss or gradient is NaN or infinite.
    """
    if not task.gradient or not task.stop:
        raise DataError("Structured purification needs documents for gradients and others for stopping. Raise --limit.")
    targets = [numbers_off(units, share, section.layout, multiple) for share in section.off]
    drawn = draw_steps(task.gradient, section.step_tokens, task.seed)
    training = _UnitTraining(task, units, section, drawn, checkpointing)
    known = task.checkpoint.read_state()
    if known is None:
        worths = measure_importance(
            task.model, units, task.gradient, task.checkpoint.part_state("worth"), checkpointing
        )
        training.choose_start(worths, targets[0])
    else:
        training.load_state(known)
    budgets = [[0] * len(targets[0]), *targets]
    for number in range(training.now.number, len(targets)):
        training.train_budget(budgets[number], budgets[number + 1])
    points = [
        CurvePoint(units.share_off(off), share, off, loss)
        for share, (loss, off) in zip(section.off, training.ends, strict=True)
    ]
    return PruningCurve(training.base, tuple(points), tuple(training.looks), training.start)


@dataclass(eq=False)
class _BudgetState:
    """How far one budget is."""

    number: int  # Which
    scores: UnitScores  # Of the units
    trusted: UnitScores  # Those of the last look that was better
    speed: float  # How far a score moves per step
    step: int = 0  # Steps done
    waited: int = 0  # Looks at the full budget without a better loss
    # Its best stopping loss and the units off there; None before its first look
    best: tuple[float, dict[int, Tensor]] | None = None


@dataclass(eq=False)
class _UnitTraining:
    """What the budgets of one training share, as `train_units` is given it."""

    task: PurifyTask
    units: ModelUnits
    section: UnitSection
    drawn: Iterator[list[AnswerBatch]]  # Steps of documents, endless
    checkpointing: Checkpointing
    # (step, share off, stopping loss) of every look so far
    looks: list[tuple[int, float, float]] = field(default_factory=list)
    done: int = 0  # Steps so far, over all budgets
    base: float = 0.0  # Stopping loss with every unit on
    start: str = ""  # The order that training began with
    # Best stopping loss of every budget that is done, and the units off there
    ends: list[tuple[float, dict[int, Tensor]]] = field(default_factory=list)
    # The budget that is open
    now: _BudgetState = field(
        default_factory=lambda: _BudgetState(0, UnitScores([], [], []), UnitScores([], [], []), 0.0)
    )

    def choose_start(self, worths: Sequence[UnitImportance], target: Sequence[int]) -> None:
        """Begin with the order of units that the stopping loss wants at the first budget."""
        self.base = mean_loss(self.task.model, self.task.stop)
        starts = {name: UnitScores.from_order(order, worths) for name, order in unit_orders(worths).items()}
        first = {name: self.eval_stopping_loss(scores, target)[0] for name, scores in starts.items()}
        self.start = min(first, key=lambda name: first[name])
        self.now = _BudgetState(0, starts[self.start], starts[self.start].with_fresh_moments(), _PACE)

    def eval_stopping_loss(self, scores: UnitScores, number: Sequence[int]) -> tuple[float, dict[int, Tensor]]:
        """Stopping loss with so many of the lowest units off, and which these are."""
        off = lowest_units(self.units, scores.values, number)
        with units_off(self.units, off):
            return mean_loss(self.task.model, self.task.stop), off

    def train_budget(self, before: Sequence[int], target: Sequence[int]) -> None:
        """Train one budget, from the last one's on: `ends` has its best stopping loss and the units off there."""
        now = self.now
        if now.best is None:
            now.best = self.eval_stopping_loss(now.trusted, target)
        while now.step < self.section.steps and now.waited < self.section.patience:
            now.step += 1
            self._train_step(before, target)
            self.task.checkpoint.write_state(self.to_state)
        self.ends.append(now.best)
        self.now = _BudgetState(
            now.number + 1, now.trusted.with_fresh_moments(), now.trusted.with_fresh_moments(), _PACE
        )

    def _train_step(self, before: Sequence[int], target: Sequence[int]) -> None:
        """A step, and the look behind some."""
        now = self.now
        opened = 1 - max(0.0, 1 - now.step / max(1, round(self.section.steps * _OPEN))) ** 3
        number = [b + math.ceil(opened * (t - b)) for b, t in zip(before, target, strict=True)]
        off = lowest_units(self.units, now.scores.values, number)
        slopes = _mask_gradients(self.task.model, self.units, off, next(self.drawn), self.checkpointing)
        now.scores.adam_step(slopes, now.speed * cosine_decay(now.step, self.section.steps))
        self.done += 1
        if now.step % self.section.every and now.step < self.section.steps:
            return
        assert now.best is not None
        loss, off = self.eval_stopping_loss(now.scores, number)
        held, held_off = now.best if opened == 1 else self.eval_stopping_loss(now.trusted, number)
        if loss < held:
            now.trusted = now.scores.with_fresh_moments()
        else:
            now.scores, now.speed = now.trusted.with_fresh_moments(), now.speed / 2
            loss, off = held, held_off
        share = self.units.share_off(off)
        self.looks.append((self.done, share, loss))
        self.task.on_round(self.done, loss, share)
        if opened < 1:
            now.best = self.eval_stopping_loss(now.trusted, target)
            return
        now.waited = 0 if loss < now.best[0] else now.waited + 1
        now.best = loss, off

    def to_state(self) -> State:
        """Everything that the next step depends on; its documents follow from the number of steps."""
        now = self.now
        ends = [*self.ends, *([now.best] if now.best else [])]
        return {
            **now.scores.to_state("scores"),
            **now.trusted.to_state("trusted"),
            **{f"end|{i}|{layer}": at for i, (_, off) in enumerate(ends) for layer, at in off.items()},
            "end losses": torch.tensor([loss for loss, _ in ends], dtype=torch.float64),
            "looks": torch.tensor(self.looks, dtype=torch.float64).reshape(-1, 3),
            "counts": torch.tensor([now.number, now.step, now.waited, self.done, int(now.best is not None)]),
            "numbers": torch.tensor([self.base, now.speed], dtype=torch.float64),
            f"start|{self.start}": torch.zeros(1),
        }

    def load_state(self, state: State) -> None:
        """Go on from a `state`."""
        device = self.units.layers[0].parts[0].weight.device
        number, step, waited, self.done, looked = state["counts"].tolist()
        self.base, speed = state["numbers"].tolist()
        self.looks = [(int(done), share, loss) for done, share, loss in state["looks"].tolist()]
        (self.start,) = unpack_state("start", state)
        ends: list[tuple[float, dict[int, Tensor]]] = [(loss, {}) for loss in state["end losses"].tolist()]
        for key, at in unpack_state("end", state).items():
            i, layer = map(int, key.split("|"))
            ends[i][1][layer] = at
        best = ends.pop() if looked else None
        self.ends = ends
        scores, trusted = (UnitScores.from_state(unpack_state(part, state), device) for part in ("scores", "trusted"))
        self.now = _BudgetState(number, scores, trusted, speed, step, waited, best)
        for _ in range(self.done):
            next(self.drawn)


def _mask_gradients(
    model: Any, units: ModelUnits, off: dict[int, Tensor], batches: Sequence[AnswerBatch], checkpointing: Checkpointing
) -> list[Tensor]:
    """dL/dm of every unit at the masked model, (count,) per layer."""
    device = units.layers[0].parts[0].weight.device
    masks = {n: m.requires_grad_() for n, m in masks_of(units, off, device).items()}
    opened = gradients_to(model, [], lambda *_: None, checkpointing=checkpointing)
    with opened, apply_masks(units, masks):
        backward(model, batches)
    found = []
    for number, mask in masks.items():
        slope = mask.grad if mask.grad is not None else torch.zeros_like(mask)
        if not bool(torch.isfinite(slope).all()):
            raise NumericError(f"The gradient of the units of layer {number} is NaN or infinite. Try --dtype float32.")
        found.append(slope)
    return found
