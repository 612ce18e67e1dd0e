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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.core.run.unit_state import NOT_KEPT, UnitState
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches, mean_loss, rows_of
from freemoe.domain_experts.purify.curvature import Curvature, forecast_loss, measure_curvature
from freemoe.domain_experts.purify.gradients import Checkpointing, backward, gradients_to
from freemoe.domain_experts.purify.greedy import OnRound, PurifyResult, check_input, decode_mask
from freemoe.domain_experts.purify.running_sums import find_strongest
from freemoe.domain_experts.purify.strongest import global_topk
from freemoe.domain_experts.purify.switches import MOMENTUM, TrustRegion, WeightSwitches, switch_all
from freemoe.kernels.waits import numbers_of
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix
from freemoe.training.descent import cosine_decay
from freemoe.training.states import State, pack_state, unpack_state

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


def draw_steps(batches: Sequence[AnswerBatch], tokens: int, seed: int) -> Iterator[list[AnswerBatch]]:
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


def training_schedule(tokens: int, step_tokens: int, steps: int | None) -> tuple[int, int]:
    """Length of a training: its steps, and the answer tokens of each.

    Args:
        tokens: Answer tokens of all documents.
        step_tokens: Answer tokens of a step at most.
        steps: Steps, or None for some passes over the documents.
    """
    each = max(1, min(step_tokens, tokens // _FRESH))
    return steps or min(MOST_STEPS, max(FEWEST_STEPS, round(PASSES * tokens / each))), each


def learn_switches(
    model: Any,
    weights: Sequence[WeightMatrix],
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
    kept: UnitState = NOT_KEPT,
) -> PurifyResult:
    """Train which weights are off for one subdomain; the model is bit-equal afterwards.

    Args:
        model: A causal LM.
        weights: Weights that may be switched off.
        gradient: Documents that train the switches.
        stop: Other documents, which say when to stop and what to keep.
        budget: Largest share of ``weights`` that is ever off.
        steps: Steps of training; the pace falls to zero over them. None: see `training_schedule`.
        step_tokens: Answer tokens of a step, about.
        every: Steps between two looks at the stopping loss: a round. None: a twelfth of the steps.
        patience: Rounds without a better stopping loss before the training ends.
        seed: Of the order of documents.
        checkpointing: As for ``gradients_to``.
        on_round: Told after every round.
        kept: Where the training keeps its state between two steps.

    Raises:
        DataError: When one of the two lists is empty.
        RecipeError: When the budget is not in (0, 1].
        NumericError: When a loss or gradient is NaN or infinite; says in which step.
    """
    check_input(gradient, stop, budget)
    tokens = sum(b.answer_tokens for b in gradient)
    steps, step_tokens = training_schedule(tokens, step_tokens, steps)
    length = _TrainingLength(steps, step_tokens, every or max(1, math.ceil(steps / ROUNDS)), patience, tokens)
    most = int(budget * sum(w.size for w in weights))
    training = _SwitchTraining(
        model, weights, stop, most, length, seed, checkpointing, on_round or (lambda *_: None), kept
    )
    curvature = training.run_training(gradient)
    found = training.found
    expected = forecast_loss(model, weights, found, curvature, stop, checkpointing=checkpointing)
    return PurifyResult(found.to("cpu"), tuple(training.losses), training.best, expected)


class _TrainingLength(NamedTuple):
    """How long a training is: steps, answer tokens of each, steps of a round, rounds that may fail, tokens of all documents."""

    steps: int
    step_tokens: int
    every: int
    patience: int
    tokens: int


@dataclass(eq=False)
class _SwitchTraining:
    """The steps: as `learn_switches` is given them, and how far they are.

    Attributes:
        most: Weights that may be off.
        found: What the best round had off.
        mask: What is off now.
        losses: On the stopping documents: the base's, then one per round.
        best: The best round.
        standing: The loss that the next round's is held against.
        line: Least score of what is off.
        step: Steps done.
    """

    model: Any
    weights: Sequence[WeightMatrix]
    stop: Sequence[AnswerBatch]
    most: int
    length: _TrainingLength
    seed: int
    checkpointing: Checkpointing
    on_round: OnRound
    kept: UnitState
    found: Mask = field(default_factory=Mask)
    mask: Mask = field(default_factory=Mask)
    losses: list[float] = field(default_factory=list)
    best: int = 0
    standing: float = 0.0
    line: float = math.inf
    step: int = 0
    pace: TrustRegion = field(default_factory=TrustRegion)
    switches: dict[str, WeightSwitches] = field(default_factory=dict)

    def run_training(self, gradient: Sequence[AnswerBatch]) -> Curvature:
        """Train to the end; returns the curvature of the base."""
        length = self.length
        self.losses = [self._eval_stopping_loss()]
        self.standing = self.losses[0]
        try:
            drawn = draw_steps(gradient, length.step_tokens, self.seed)
            measured = [batch for _ in range(MEASURED_STEPS) for batch in next(drawn)]
            curvature = measure_curvature(
                self.model,
                self.weights,
                measured,
                checkpointing=self.checkpointing,
                kept=self.kept.part_state("curvature"),
            )
            unit = curvature.small_cost(self.weights)
            self.switches = {w.name: WeightSwitches.all_on(w, self.seed) for w in self.weights}
            self._load_state(self.kept.read_state())
            for _ in range(self.step):
                next(drawn)
            while self.step < (length.steps if unit and self.most else 0) and not self._is_enough():
                self.step += 1
                self._train_step(next(drawn), unit, curvature)
                self.kept.write_state(self._to_state)
        except NumericError as error:
            raise NumericError(f"Learned switches, step {self.step}, {self.mask.count} weights off: {error}") from None
        return curvature

    def _is_enough(self) -> bool:
        """Whether so many rounds were no better; asked between steps, it is true from the end of such a round on."""
        return len(self.losses) - 1 - self.best >= self.length.patience

    def _train_step(self, batch: list[AnswerBatch], unit: float, curvature: Curvature) -> None:
        """A step, and at the end of a round the look at the stopping documents."""
        step, length = self.step, self.length
        # Gradients of n tokens are noise of size sqrt(h / n): so paced, evidence is compared with costs in units.
        rate = self.pace.value * cosine_decay(step, length.steps)
        rate *= unit * math.sqrt(sum(b.answer_tokens for b in batch)) / (1 - MOMENTUM**step)
        with switched_off(self.weights, self.mask):
            _accumulate_gradients(self.model, self.switches, batch, self.checkpointing)
        if self.mask:
            self.pace.update_slope(sum(numbers_of([s.slope for s in self.switches.values()])))
        if step * length.step_tokens >= length.tokens:
            self.pace.freeze_growth()
        for switch in self.switches.values():
            switch.update_evidence(rate)
        self.mask, self.line = _switch_topk(self.switches, curvature, self.most, self.line)
        if step % length.every == 0 or step == length.steps:
            self._close_round(curvature)

    def _eval_stopping_loss(self) -> float:
        with switched_off(self.weights, self.mask):
            return mean_loss(self.model, self.stop, self.kept.part_state(f"look {len(self.losses)}"))

    def _close_round(self, curvature: Curvature) -> None:
        losses = self.losses
        losses.append(self._eval_stopping_loss())
        self.on_round(len(losses) - 1, losses[-1], self.mask.off_share(self.weights))
        if losses[-1] > self.standing:
            self.pace.shrink_step()
        self.standing = losses[-1]
        if losses[-1] < losses[self.best]:
            self.best, self.found = len(losses) - 1, self.mask
            _apply_to_all(self.switches, WeightSwitches.save_best)
        elif losses[-1] - losses[self.best] > _LOST * (losses[0] - losses[self.best]):
            _apply_to_all(self.switches, WeightSwitches.restore_best)
            (self.mask, self.line), self.standing = (
                _switch_topk(self.switches, curvature, self.most, self.line),
                losses[self.best],
            )

    def _to_state(self) -> State:
        """Everything that the next step depends on; the steps' documents follow from seed and number."""
        trend = math.nan if self.pace.trend is None else self.pace.trend
        numbers = [self.standing, self.line, self.pace.value, trend]
        return {
            **pack_state("found", self.found.encode()),
            **pack_state("mask", self.mask.encode()),
            **{key: t for s in self.switches.values() for key, t in s.to_state().items()},
            "counts": torch.tensor([self.best, self.step, int(self.pace.growing)]),
            "numbers": torch.tensor([*numbers, *self.losses], dtype=torch.float64),
        }

    def _load_state(self, state: State | None) -> None:
        """Go on from a state; None: begin."""
        if state is None:
            return
        self.found, self.mask = (decode_mask(unpack_state(part, state), self.weights) for part in ("found", "mask"))
        for switch in self.switches.values():
            own = self.mask.get(switch.weight.name)
            switch.load_state(state, own or TensorMask.empty_mask(switch.weight.size, switch.weight.device))
        self.best, self.step, growing = state["counts"].tolist()
        self.standing, self.line, pace, trend, *self.losses = state["numbers"].tolist()
        self.pace = TrustRegion(pace, bool(growing), None if math.isnan(trend) else trend)


def _accumulate_gradients(
    model: Any,
    switches: dict[str, WeightSwitches],
    batches: Sequence[AnswerBatch],
    checkpointing: Checkpointing,
) -> None:
    """One backward pass at the model as it is; every weight's switches take its gradient as it comes."""

    def add_gradient(weight: WeightMatrix, gradient: Tensor) -> None:
        switches[weight.name].add_gradient(gradient)

    _apply_to_all(switches, WeightSwitches.decay_gradients)
    with gradients_to(model, [s.weight for s in switches.values()], add_gradient, checkpointing=checkpointing):
        backward(model, batches)


def _apply_to_all(switches: dict[str, WeightSwitches], do: Callable[[WeightSwitches], None]) -> None:
    for switch in switches.values():
        do(switch)


def _switch_topk(
    switches: dict[str, WeightSwitches], curvature: Curvature, most: int, line: float
) -> tuple[Mask, float]:
    """Switch to the ``most`` highest scores above 0 being off.

    Returns:
        Their mask, and the least of them; ``line`` is that of the last time, which spares a look.
    """
    find_strongest(s.evidence for s in switches.values())
    picked = global_topk([partial(s.switch_scores, curvature) for s in switches.values()], most, hint=_NEAR * line)
    switch_all(list(switches.values()), picked.masks)
    return Mask(dict(zip(switches, picked.masks, strict=True))), picked.line
