"""Signed purification with learned switches: which weights are off is trained, no value is (`docs/methods.md`).

Every weight gathers evidence: the sum of its gradients dL/dw, each taken at the model as it is masked by then
(straight-through, so that weights that are off have gradients too). A weight is off while what its removal gains by that
evidence is more than what it disturbs,

    score = w * evidence - w^2 h > 0,

h being the curvature (`curvature`). Of a large matrix's evidence only the strongest directions count (`running_sums`). Where
the masked model has what a direction offers, its gradient vanishes and evidence stops to grow; where it has gone too far the
gradient turns, and weights come back. Weights near zero go first, super weights never. Beyond the budget the highest scores
win.

How fast evidence may count is settled by the training itself. The gradient of the next documents, which chose nothing,
says whether the last change of the mask still went downhill at its end; as long as it did, steps grow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches, mean_loss, rows_of
from freemoe.domain_experts.purify.curvature import Curvature, forecast, measure_curvature
from freemoe.domain_experts.purify.gradients import Checkpointing, backward, finite, gradients_to
from freemoe.domain_experts.purify.greedy import OnRound, Purified, check_input
from freemoe.domain_experts.purify.running_sums import KEPT, RunningSum, running_sum
from freemoe.domain_experts.purify.strongest import strongest
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.switching import switched_off
from freemoe.models.weights import Weight
from freemoe.training.descent import cosine

# A first step at this pace switches a half percent of the weights off, by noise alone: harmless, as they are near zero.
_PACE = 0.2
# While steps end downhill each is larger than the last; a look that finds the loss risen halves them.
_GROW, _HALVE = 1.2, 0.5
# A look that lost more than this part of what was gained by the best one is no chance: training goes back to that one.
_LOST = 0.05
# Documents that the curvature is measured on, as steps of training.
MEASURED_STEPS = 2
# A step takes at most this part of the documents, so that the next one brings others.
_FRESH = 8
# Passes over the documents that a training makes where the recipe does not say how long it is, and its bounds.
PASSES, FEWEST_STEPS, MOST_STEPS = 5, 24, 600
# Looks at the stopping loss, about, where the recipe does not say how often.
ROUNDS = 12
# The scores that win a step are looked for above this part of the last step's least one.
_NEAR = 0.8
# Memory of the running mean of gradients: a step follows about ten batches, not one.
_MOMENTUM = 0.9


@dataclass(eq=False)
class Switches:
    """The switches of one weight, all flat in (experts, rows, columns) order.

    Attributes:
        weight: The weight they belong to.
        mean: The running mean of gradients.
        evidence: The sum of its paced states.
        best: The same at the best look so far.
        off: Which are off by now.
        moved: Which of them the last step switched.
        change: ``(moved,)`` fp32: what that added to the weight: -w where it went off, +w where it came back.
        slope: dL of the last change, by the gradient that came after it.
    """

    weight: Weight
    mean: RunningSum
    evidence: RunningSum
    best: RunningSum
    off: TensorMask
    moved: TensorMask
    change: Tensor
    slope: float = 0.0

    @staticmethod
    def fresh(weight: Weight, seed: int = 0) -> Switches:
        """All on, and knowing nothing yet; ``seed`` as for `running_sum`."""
        device = weight.device
        mean, evidence = (running_sum(weight.shape, seed, device) for _ in range(2))
        none = TensorMask.nothing(weight.size, device)
        return Switches(weight, mean, evidence, evidence.copy(), none, none, torch.empty(0, device=device))

    def forget(self) -> None:
        """Before a pass: what older gradients said counts a little less."""
        self.mean.fade(_MOMENTUM)
        self.slope = 0.0

    def take(self, gradient: Tensor) -> None:
        """Add (a part of) a pass's gradient ``(E, R, C)`` to the mean; note what it says of the last change."""
        gradient = finite(gradient, self.weight)
        self.slope += float((self.moved.pick(gradient).float() * self.change).sum(dtype=torch.float64))
        self.mean.add(gradient, 1 - _MOMENTUM)

    def advance(self, rate: float) -> None:
        """After a pass: let the mean count as evidence."""
        self.evidence.add(self.mean.total(KEPT), rate)

    def keep(self) -> None:
        """This look is the best so far."""
        self.best = self.evidence.copy()

    def go_back(self) -> None:
        """Take the evidence of the best look again, and forget what came after it."""
        self.evidence = self.best.copy()
        self.mean.fade(0.0)

    def scores(self, curvature: Curvature) -> Tensor:
        """W * evidence - w^2 h of every switch: ``(n,)`` fp32."""
        own = self.weight.view().float()
        bent = own.square().mul_(curvature.of(self.weight))
        return (own * self.evidence.total()).sub_(bent).reshape(-1)

    def switch(self, off: TensorMask) -> None:
        """Switch to the weights of a mask being off, the others on."""
        self.moved = self.off ^ off
        own = self.moved.pick(self.weight.view()).float()
        self.change = torch.where(self.moved.pick(off.bools()), -own, own)
        self.off = off


@dataclass
class Pace:
    """How much a step's gradients add to the evidence: the trust region of learned switches.

    Attributes:
        value: The pace, before the schedule takes its share.
        growing: Whether steps still become larger.
        trend: Running mean of the slopes at the ends of steps.
    """

    value: float = _PACE
    growing: bool = True
    trend: float | None = None

    def heard(self, slope: float) -> None:
        """A fresh gradient said how the last step ended: below 0 it still went downhill."""
        self.trend = slope if self.trend is None else 0.5 * (self.trend + slope)
        self.growing = self.growing and self.trend < 0
        if self.growing:
            self.value *= _GROW

    def settle(self) -> None:
        """All documents have been seen, so that no gradient is fresh any more."""
        self.growing = False

    def rose(self) -> None:
        """The stopping loss rose since the last look."""
        self.growing = False
        self.value *= _HALVE


def draw(batches: Sequence[AnswerBatch], tokens: int, seed: int) -> Iterator[list[AnswerBatch]]:
    """Endless steps of documents in a seeded random order, anew for every pass over all of them.

    Args:
        batches: The documents; a step's batches are no larger than the largest of these.
        tokens: Answer tokens of a step, about; a step takes every document at most once.
        seed: Of the order.
    """
    rows = rows_of(batches)
    limit = max(b.ids.numel() for b in batches)
    device = batches[0].ids.device
    generator = random.Random(seed)
    number = max(1, round(tokens * len(rows) / sum(len(answer) for _, answer in rows)))
    while True:
        order = generator.sample(rows, len(rows))
        # A rest that makes no whole step waits for another pass, so that all steps weigh the same.
        for first in range(0, max(1, len(order) - number + 1), number):
            chosen = order[first : first + number]
            yield answer_batches(chosen, [0] * len(chosen), limit, device)


def schedule(tokens: int, step_tokens: int, steps: int | None) -> tuple[int, int]:
    """Length of a training: its steps, and the answer tokens of each.

    Args:
        tokens: Answer tokens of all documents.
        step_tokens: Answer tokens of a step at most.
        steps: Steps, or None for some passes over the documents.
    """
    each = max(1, min(step_tokens, tokens // _FRESH))
    return steps or min(MOST_STEPS, max(FEWEST_STEPS, round(PASSES * tokens / each))), each


def learn(
    model: Any,
    weights: Sequence[Weight],
    gradient: Sequence[AnswerBatch],
    stop: Sequence[AnswerBatch],
    *,
    budget: float = 0.01,
    steps: int | None = None,
    step_tokens: int = 2048,
    every: int | None = None,
    patience: int = 8,
    seed: int = 0,
    checkpointing: Checkpointing = False,
    on_round: OnRound | None = None,
) -> Purified:
    """Train which weights are off for one subdomain; the model is bit-equal afterwards.

    Args:
        model: A causal LM.
        weights: Weights that may be switched off.
        gradient: Documents that train the switches.
        stop: Other documents, which say when to stop and what to keep.
        budget: Largest share of ``weights`` that is ever off.
        steps: Steps of training; the pace falls to zero over them. None: see `schedule`.
        step_tokens: Answer tokens of a step, about.
        every: Steps between two looks at the stopping loss: a round. None: a twelfth of the steps.
        patience: Rounds without a better stopping loss before the training ends.
        seed: Of the order of documents.
        checkpointing: As for ``gradients_to``.
        on_round: Told after every round.

    Raises:
        DataError: When one of the two lists is empty.
        RecipeError: When the budget is not in (0, 1].
        NumericError: When a loss or gradient is NaN or infinite; says in which step.
    """
    check_input(gradient, stop, budget)
    tokens = sum(b.answer_tokens for b in gradient)
    steps, step_tokens = schedule(tokens, step_tokens, steps)
    length = _Length(steps, step_tokens, every or max(1, math.ceil(steps / ROUNDS)), patience, tokens)
    most = int(budget * sum(w.size for w in weights))
    kept, losses, best, curvature = _train(
        model, weights, gradient, stop, most, length, seed, checkpointing, on_round or (lambda *_: None)
    )
    expected = forecast(model, weights, kept, curvature, stop, checkpointing=checkpointing)
    return Purified(kept.to("cpu"), tuple(losses), best, expected)


class _Length(NamedTuple):
    """How long a training is: steps, answer tokens of each, steps of a round, rounds that may fail, tokens of all documents."""

    steps: int
    step_tokens: int
    every: int
    patience: int
    tokens: int


def _train(
    model: Any,
    weights: Sequence[Weight],
    gradient: Sequence[AnswerBatch],
    stop: Sequence[AnswerBatch],
    most: int,
    length: _Length,
    seed: int,
    checkpointing: Checkpointing,
    on_round: OnRound,
) -> tuple[Mask, list[float], int, Curvature]:
    """The steps: which weights the best round had off, the rounds' stopping losses, which round it was, the curvature."""
    losses = [mean_loss(model, stop)]
    best, step, standing = 0, 0, losses[0]
    kept = mask = Mask()
    pace, line = Pace(), math.inf
    try:
        drawn = draw(gradient, length.step_tokens, seed)
        measured = [batch for _ in range(MEASURED_STEPS) for batch in next(drawn)]
        curvature = measure_curvature(model, weights, measured, checkpointing=checkpointing)
        unit = curvature.small_cost(weights)
        switches = {w.name: Switches.fresh(w, seed) for w in weights}
        for step in range(1, length.steps + 1 if unit and most else 1):
            batch = next(drawn)
            # Gradients of n tokens are noise of size sqrt(h / n): so paced, evidence is compared with costs in units.
            rate = pace.value * cosine(step, length.steps)
            rate *= unit * math.sqrt(sum(b.answer_tokens for b in batch)) / (1 - _MOMENTUM**step)
            with switched_off(weights, mask):
                _gather(model, switches, batch, checkpointing)
            if mask:
                pace.heard(sum(s.slope for s in switches.values()))
            if step * length.step_tokens >= length.tokens:
                pace.settle()
            for switch in switches.values():
                switch.advance(rate)
            mask, line = _switch(switches, curvature, most, line)
            if step % length.every and step < length.steps:
                continue
            with switched_off(weights, mask):
                losses.append(mean_loss(model, stop))
            on_round(len(losses) - 1, losses[-1], mask.share(weights))
            if losses[-1] > standing:
                pace.rose()
            standing = losses[-1]
            if losses[-1] < losses[best]:
                best, kept = len(losses) - 1, mask
                _all(switches, Switches.keep)
            elif losses[-1] - losses[best] > _LOST * (losses[0] - losses[best]):
                _all(switches, Switches.go_back)
                (mask, line), standing = _switch(switches, curvature, most, line), losses[best]
            if len(losses) - 1 - best >= length.patience:
                break
    except NumericError as error:
        raise NumericError(f"Learned switches, step {step}, {mask.count} weights off: {error}") from None
    return kept, losses, best, curvature


def _gather(
    model: Any,
    switches: dict[str, Switches],
    batches: Sequence[AnswerBatch],
    checkpointing: Checkpointing,
) -> None:
    """One backward pass at the model as it is; every weight's switches take its gradient as it comes."""

    def take(weight: Weight, gradient: Tensor) -> None:
        switches[weight.name].take(gradient)

    _all(switches, Switches.forget)
    with gradients_to(model, [s.weight for s in switches.values()], take, checkpointing=checkpointing):
        backward(model, batches)


def _all(switches: dict[str, Switches], do: Callable[[Switches], None]) -> None:
    for switch in switches.values():
        do(switch)


def _switch(switches: dict[str, Switches], curvature: Curvature, most: int, line: float) -> tuple[Mask, float]:
    """Switch to the ``most`` highest scores above 0 being off.

    Returns:
        Their mask, and the least of them; ``line`` is that of the last time, which spares a look.
    """
    picked = strongest([partial(s.scores, curvature) for s in switches.values()], most, hint=_NEAR * line)
    for switch, off in zip(switches.values(), picked.masks, strict=True):
        switch.switch(off)
    return Mask(dict(zip(switches, picked.masks, strict=True))), picked.line
