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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches, mean_loss, rows_of
from freemoe.domain_experts.purify.curvature import Curvature, forecast_loss, measure_curvature
from freemoe.domain_experts.purify.gradients import Checkpointing, backward, gradients_to
from freemoe.domain_experts.purify.greedy import PurifyResult, PurifyTask, decode_mask
from freemoe.domain_experts.purify.running_sums import find_strongest
from freemoe.domain_experts.purify.strongest import global_topk
from freemoe.domain_experts.purify.switches import MOMENTUM, TrustRegion, WeightSwitches, switch_all
from freemoe.domain_experts.recipe import SaliencySection
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

    A step has about ``tokens`` answer tokens and every document at most once; its batches are no larger than the largest of
    these.
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

    Without a number of steps it makes some passes over the documents.
    """
    each = max(1, min(step_tokens, tokens // _FRESH))
    return steps or min(MOST_STEPS, max(FEWEST_STEPS, round(PASSES * tokens / each))), each


def learn_switches(task: PurifyTask, section: SaliencySection) -> PurifyResult:
    """Train which weights are off for one subdomain; the model is bit-equal afterwards.

    Raises:
        DataError: When there are no documents for gradients, or none for stopping.
        NumericError: When a loss or gradient is NaN or infinite; says in which step.
    """
    task.require_documents()
    tokens = sum(b.answer_tokens for b in task.gradient)
    steps, step_tokens = training_schedule(tokens, section.step_tokens, section.steps)
    every = section.every or max(1, math.ceil(steps / ROUNDS))
    most = int(section.budget * sum(w.size for w in task.weights))
    training = _SwitchTraining(task, section, most, tokens, steps, step_tokens, every)
    curvature = training.run_training()
    found = training.best_mask
    expected = forecast_loss(task.model, task.weights, found, curvature, task.stop, checkpointing=section.checkpointing)
    return PurifyResult(found.to("cpu"), tuple(training.losses), training.best, expected)


@dataclass(eq=False)
class _SwitchTraining:
    """The steps: as `learn_switches` is given them, and how far they are."""

    task: PurifyTask
    section: SaliencySection
    most: int  # Weights that may be off
    tokens: int  # Answer tokens of all documents
    steps: int  # Of the training; the pace falls to zero over them
    step_tokens: int  # Answer tokens of a step
    every: int  # Steps of a round
    best_mask: Mask = field(default_factory=Mask)  # What the best round had off
    mask: Mask = field(default_factory=Mask)  # What is off now
    losses: list[float] = field(default_factory=list)  # On the stopping documents: the base's, then one per round
    best: int = 0  # The best round
    standing: float = 0.0  # The loss that the next round's is held against
    line: float = math.inf  # Least score of what is off
    step: int = 0  # Steps done
    pace: TrustRegion = field(default_factory=TrustRegion)
    switches: dict[str, WeightSwitches] = field(default_factory=dict)

    def run_training(self) -> Curvature:
        """Train to the end; returns the curvature of the base."""
        self.losses = [self._eval_stopping_loss()]
        self.standing = self.losses[0]
        try:
            drawn = draw_steps(self.task.gradient, self.step_tokens, self.task.seed)
            measured = [batch for _ in range(MEASURED_STEPS) for batch in next(drawn)]
            curvature = measure_curvature(
                self.task.model,
                self.task.weights,
                measured,
                checkpointing=self.section.checkpointing,
                checkpoint=self.task.checkpoint.part_state("curvature"),
            )
            unit = curvature.small_cost(self.task.weights)
            self.switches = {w.name: WeightSwitches.all_on(w, self.task.seed) for w in self.task.weights}
            self._load_state(self.task.checkpoint.read_state())
            for _ in range(self.step):
                next(drawn)
            while self.step < (self.steps if unit and self.most else 0) and not self._is_enough():
                self.step += 1
                self._train_step(next(drawn), unit, curvature)
                self.task.checkpoint.write_state(self._to_state)
        except NumericError as error:
            raise NumericError(f"Learned switches, step {self.step}, {self.mask.count} weights off: {error}") from None
        return curvature

    def _is_enough(self) -> bool:
        """Whether so many rounds were no better; asked between steps, it is true from the end of such a round on."""
        return len(self.losses) - 1 - self.best >= self.section.patience

    def _train_step(self, batch: list[AnswerBatch], unit: float, curvature: Curvature) -> None:
        """A step, and at the end of a round the look at the stopping documents."""
        step = self.step
        # Gradients of n tokens are noise of size sqrt(h / n): so paced, evidence is compared with costs in units.
        rate = self.pace.value * cosine_decay(step, self.steps)
        rate *= unit * math.sqrt(sum(b.answer_tokens for b in batch)) / (1 - MOMENTUM**step)
        with switched_off(self.task.weights, self.mask):
            _accumulate_gradients(self.task.model, self.switches, batch, self.section.checkpointing)
        if self.mask:
            self.pace.update_slope(sum(numbers_of([s.slope for s in self.switches.values()])))
        if step * self.step_tokens >= self.tokens:
            self.pace.freeze_growth()
        for switch in self.switches.values():
            switch.update_evidence(rate)
        self.mask, self.line = _switch_topk(self.switches, curvature, self.most, self.line)
        if step % self.every == 0 or step == self.steps:
            self._close_round(curvature)

    def _eval_stopping_loss(self) -> float:
        with switched_off(self.task.weights, self.mask):
            return mean_loss(
                self.task.model, self.task.stop, self.task.checkpoint.part_state(f"look {len(self.losses)}")
            )

    def _close_round(self, curvature: Curvature) -> None:
        losses = self.losses
        losses.append(self._eval_stopping_loss())
        self.task.on_round(len(losses) - 1, losses[-1], self.mask.off_share(self.task.weights))
        if losses[-1] > self.standing:
            self.pace.shrink_step()
        self.standing = losses[-1]
        if losses[-1] < losses[self.best]:
            self.best, self.best_mask = len(losses) - 1, self.mask
            for switch in self.switches.values():
                switch.save_best()
        elif losses[-1] - losses[self.best] > _LOST * (losses[0] - losses[self.best]):
            for switch in self.switches.values():
                switch.restore_best()
            self.mask, self.line = _switch_topk(self.switches, curvature, self.most, self.line)
            self.standing = losses[self.best]

    def _to_state(self) -> State:
        """Everything that the next step depends on; the steps' documents follow from seed and number."""
        trend = math.nan if self.pace.trend is None else self.pace.trend
        numbers = [self.standing, self.line, self.pace.value, trend]
        return {
            **pack_state("found", self.best_mask.encode()),
            **pack_state("mask", self.mask.encode()),
            **{key: t for s in self.switches.values() for key, t in s.to_state().items()},
            "counts": torch.tensor([self.best, self.step, int(self.pace.growing)]),
            "numbers": torch.tensor([*numbers, *self.losses], dtype=torch.float64),
        }

    def _load_state(self, state: State | None) -> None:
        """Go on from a state; None: begin."""
        if state is None:
            return
        self.best_mask, self.mask = (
            decode_mask(unpack_state(part, state), self.task.weights) for part in ("found", "mask")
        )
        for switch in self.switches.values():
            own = self.mask.get(switch.weight.name)
            switch.load_state(state, own or TensorMask.empty_mask(switch.weight.size, switch.weight.device))
        self.best, self.step, growing = state["counts"].tolist()
        self.standing, self.line, pace, trend, *self.losses = state["numbers"].tolist()
        self.pace = TrustRegion(pace, bool(growing), None if math.isnan(trend) else trend)


def _accumulate_gradients(
    model: Any, switches: dict[str, WeightSwitches], batches: Sequence[AnswerBatch], checkpointing: Checkpointing
) -> None:
    """One backward pass at the model as it is; every weight's switches take its gradient as it comes."""

    def add_gradient(weight: WeightMatrix, gradient: Tensor) -> None:
        switches[weight.name].add_gradient(gradient)

    for switch in switches.values():
        switch.decay_gradients()
    with gradients_to(model, [s.weight for s in switches.values()], add_gradient, checkpointing=checkpointing):
        backward(model, batches)


def _switch_topk(
    switches: dict[str, WeightSwitches], curvature: Curvature, most: int, line: float
) -> tuple[Mask, float]:
    """Switch to the ``most`` highest scores above 0 being off.

    Gives their mask and the least of them; ``line`` is that of the last time, which spares a look.
    """
    find_strongest(s.evidence for s in switches.values())
    picked = global_topk([partial(s.switch_scores, curvature) for s in switches.values()], most, hint=_NEAR * line)
    switch_all(list(switches.values()), picked.masks)
    return Mask(dict(zip(switches, picked.masks, strict=True))), picked.line
