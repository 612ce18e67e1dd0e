"""Signed purification with learned switches: which weights are off is trained, no value is (`docs/methods.md`).

Every candidate weight gathers evidence: the sum of its gradients dL/dw, each taken at the model as it is masked by then
(straight-through, so that weights that are off have gradients too). A weight is off while what its removal gains by that
evidence is more than what it disturbs,

    score = w * evidence - w^2 h > 0,

h being the curvature (`curvature`), and the evidence of a large matrix being smoothed first: only its few strongest
directions count. Where the masked model has what a direction offers, its gradient vanishes and evidence
stops to grow; where it has gone too far the gradient turns, and weights come back. Weights near zero go first, super
weights never. Beyond the budget the highest scores win.

How fast evidence may count is settled by the training itself. The gradient of the next documents, which chose nothing,
says whether the last change of the mask still went downhill at its end; as long as it did, steps grow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.domain_experts.batches import AnswerBatch, answer_batches, mean_loss, rows_of
from freemoe.domain_experts.curvature import Curvature, forecast, measure_curvature
from freemoe.domain_experts.gradients import Checkpointing, backward, finite, gradients_to, strongest
from freemoe.domain_experts.saliency import OnRound, Purified, check_input
from freemoe.domain_experts.switching import count, switched_off
from freemoe.errors import NumericError, RecipeError
from freemoe.families.weights import Weight

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
# Memory of the running mean of gradients: a step follows about ten batches, not one.
_MOMENTUM = 0.9
RANK, WIDE = 16, 128
"""Directions of a matrix's evidence that count, where both its sides are more than ``WIDE``. A gradient is a sum of outer
products: what documents have in common is in few directions, what is theirs alone in all of them, and a large matrix that
follows them all learns documents by heart. A small one cannot, and needs all."""
WEIGHT_BYTES, CANDIDATE_BYTES = 2, 8
"""Memory of a training: per weight whether it is off and whether it is a candidate; per candidate evidence, its best state and a mean."""


@dataclass(eq=False)
class Switches:
    """The candidates of one weight, all flat in (experts, rows, columns) order.

    Attributes:
        weight: The weight they belong to.
        inside: ``(n,)`` bool: which of its n weights are candidates, k of them; None for all.
        evidence: ``(k,)`` fp32: the sum of paced means of gradients.
        mean: ``(k,)`` bf16: the running mean of gradients.
        best: ``(k,)`` bf16: the evidence at the best look so far.
        off: ``(n,)`` bool: which are off by now.
        moved: ``(m,)`` int64: which of them the last step switched.
        change: ``(m,)`` fp32: what that added to the weight: -w where it went off, +w where it came back.
        slope: dL of the last change, by the gradient that came after it.
        directions: ``(E, C, RANK)`` fp32, orthonormal: the inputs' directions in which evidence was strongest at the last
            step; None for a small matrix, all of whose evidence counts.
    """

    weight: Weight
    inside: Tensor | None
    evidence: Tensor
    mean: Tensor
    best: Tensor
    off: Tensor
    moved: Tensor
    change: Tensor
    slope: float = 0.0
    directions: Tensor | None = None

    @staticmethod
    def fresh(weight: Weight, inside: Tensor | None, seed: int = 0) -> Switches:
        """Candidates that are on and know nothing yet; the seed decides where the search for directions begins."""
        device = weight.parameter.device
        number = weight.size if inside is None else int(inside.sum())
        directions = None
        if min(weight.rows, weight.columns) > WIDE:
            start = torch.randn(weight.columns, RANK, generator=torch.Generator().manual_seed(seed))
            directions = torch.linalg.qr(start).Q.expand(weight.experts, -1, -1).to(device)
        return Switches(
            weight,
            inside,
            torch.zeros(number, device=device),
            torch.zeros(number, dtype=torch.bfloat16, device=device),
            torch.zeros(number, dtype=torch.bfloat16, device=device),
            torch.zeros(weight.size, dtype=torch.bool, device=device),
            torch.empty(0, dtype=torch.long, device=device),
            torch.empty(0, device=device),
            directions=directions,
        )

    def forget(self) -> None:
        """Before a pass: what older gradients said counts a little less."""
        self.mean.mul_(_MOMENTUM)
        self.slope = 0.0

    def take(self, gradient: Tensor) -> None:
        """Add (a part of) a pass's gradient ``(E, R, C)`` to the mean; note what it says of the last change."""
        flat = finite(gradient, self.weight).reshape(-1)
        self.mean.add_(self._candidates(flat), alpha=1 - _MOMENTUM)
        self.slope += float((flat[self.moved].float() * self.change).sum(dtype=torch.float64))

    def advance(self, rate: float) -> None:
        """After a pass: let the mean count as evidence."""
        self.evidence.add_(self.mean, alpha=rate)

    def keep(self) -> None:
        """This look is the best so far."""
        self.best.copy_(self.evidence)

    def go_back(self) -> None:
        """Take the evidence of the best look again, and forget what came after it."""
        self.evidence.copy_(self.best)
        self.mean.zero_()

    def _candidates(self, flat: Tensor) -> Tensor:
        return flat if self.inside is None else flat[self.inside]

    def scores(self, curvature: Curvature) -> Tensor:
        """W * (smooth evidence) - w^2 h of every candidate: ``(k,)`` fp32."""
        own = self.weight.view().float()
        bent = own.square().mul_(curvature.of(self.weight)).reshape(-1)
        return self._candidates(own.reshape(-1)).mul(self.smooth()).sub_(self._candidates(bent))

    def smooth(self) -> Tensor:
        """Evidence in its few strongest directions only, ``(k,)`` fp32.

        One step of subspace iteration (Halko et al. 2011, arXiv:0909.4061) from where the last one ended: they turn slowly.
        """
        if self.directions is None:
            return self.evidence
        flat = self.evidence
        if self.inside is not None:
            flat = torch.zeros(self.weight.size, device=flat.device)
            flat[self.inside] = self.evidence
        matrix = flat.view(self.weight.shape)
        rows = torch.linalg.qr(matrix @ self.directions).Q
        self.directions = torch.linalg.qr(matrix.mT @ rows).Q
        return self._candidates((rows @ (rows.mT @ matrix)).reshape(-1))

    def places(self, numbers: Tensor) -> Tensor:
        """Positions in the weight of the candidates with these (sorted) numbers."""
        return numbers if self.inside is None else self.inside.nonzero().flatten()[numbers]

    def switch(self, where: Tensor) -> None:
        """Switch to the weights at ``where`` (sorted positions) being off, the others on."""
        off = torch.zeros_like(self.off)
        off[where] = True
        self.moved = (off ^ self.off).nonzero().flatten()
        own = self.weight.view().reshape(-1)[self.moved].float()
        self.change = torch.where(off[self.moved], -own, own)
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


def candidates_of(weights: Sequence[Weight], curvature: Curvature, share: float) -> list[Tensor | None]:
    """Which weights may go off: those with the smallest costs, a ``share`` of each matrix; None for all of them."""
    if share >= 1:
        return [None] * len(weights)
    found: list[Tensor | None] = []
    for weight in weights:
        cost = curvature.cost(weight).flatten()
        most = cost.kthvalue(max(1, math.ceil(share * len(cost)))).values
        found.append(cost <= most)
    return found


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
    candidates: float = 1.0,
    steps: int | None = None,
    step_tokens: int = 2048,
    every: int | None = None,
    patience: int = 8,
    seed: int = 0,
    checkpointing: Checkpointing = False,
    compute: torch.dtype | None = None,
    on_round: OnRound | None = None,
) -> Purified:
    """Train which weights are off for one subdomain; the model is bit-equal afterwards.

    Args:
        model: A causal LM.
        weights: Weights that may be switched off.
        gradient: Documents that train the switches.
        stop: Other documents, which say when to stop and what to keep.
        budget: Largest share of ``weights`` that is ever off.
        candidates: Share of each matrix that may go off at all, those with the smallest costs: less memory. On a large
            base hardly anything else ever goes off; on a small one far from home it does.
        steps: Steps of training; the pace falls to zero over them. None: see `schedule`.
        step_tokens: Answer tokens of a step, about.
        every: Steps between two looks at the stopping loss: a round. None: a twelfth of the steps.
        patience: Rounds without a better stopping loss before the training ends.
        seed: Of the order of documents.
        checkpointing: As for ``gradients_to``.
        compute: As for ``backward``; stopping losses are taken in it too, so that they compare with each other alone.
        on_round: Told after every round.

    Raises:
        DataError: When one of the two lists is empty.
        RecipeError: When the budget is not in (0, 1], or the candidates are fewer than it.
        NumericError: When a loss or gradient is NaN or infinite; says in which step.
    """
    check_input(gradient, stop, budget)
    if not budget <= candidates <= 1:
        raise RecipeError(
            f"saliency.candidates is {candidates}, saliency.budget {budget}: every weight that is off is a candidate, so "
            "candidates must be at least the budget, and at most 1."
        )
    most = int(budget * sum(w.size for w in weights))
    tokens = sum(b.answer_tokens for b in gradient)
    steps, step_tokens = schedule(tokens, step_tokens, steps)
    every = every or max(1, math.ceil(steps / ROUNDS))
    losses = [mean_loss(model, stop, compute)]
    best, step, standing = 0, 0, losses[0]
    kept: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    pace = Pace()
    try:
        drawn = draw(gradient, step_tokens, seed)
        measured = [batch for _ in range(MEASURED_STEPS) for batch in next(drawn)]
        curvature = measure_curvature(model, weights, measured, checkpointing=checkpointing, compute=compute)
        unit = curvature.small_cost(weights)
        inside = candidates_of(weights, curvature, candidates)
        switches = {w.name: Switches.fresh(w, i, seed) for w, i in zip(weights, inside, strict=True)}
        for step in range(1, steps + 1 if unit and most else 1):
            batch = next(drawn)
            # Gradients of n tokens are noise of size sqrt(h / n): so paced, evidence is compared with costs in units.
            rate = pace.value * (1 + math.cos(math.pi * step / steps)) / 2
            rate *= unit * math.sqrt(sum(b.answer_tokens for b in batch)) / (1 - _MOMENTUM**step)
            with switched_off(weights, mask):
                _gather(model, switches, batch, checkpointing, compute)
            if mask:
                pace.heard(sum(s.slope for s in switches.values()))
            if step * step_tokens >= tokens:
                pace.settle()
            for switch in switches.values():
                switch.advance(rate)
            mask = _switch(switches, curvature, most)
            if step % every and step < steps:
                continue
            with switched_off(weights, mask):
                losses.append(mean_loss(model, stop, compute))
            if on_round:
                on_round(len(losses) - 1, losses[-1], count(mask) / sum(w.size for w in weights))
            if losses[-1] > standing:
                pace.rose()
            standing = losses[-1]
            if losses[-1] < losses[best]:
                best, kept = len(losses) - 1, mask
                _all(switches, Switches.keep)
            elif losses[-1] - losses[best] > _LOST * (losses[0] - losses[best]):
                _all(switches, Switches.go_back)
                mask, standing = _switch(switches, curvature, most), losses[best]
            if len(losses) - 1 - best >= patience:
                break
    except NumericError as error:
        raise NumericError(f"Learned switches, step {step}, {count(mask)} weights off: {error}") from None
    expected = forecast(model, weights, kept, curvature, stop, checkpointing=checkpointing, compute=compute)
    return Purified({name: p.cpu() for name, p in kept.items()}, tuple(losses), best, expected)


def _gather(
    model: Any,
    switches: dict[str, Switches],
    batches: Sequence[AnswerBatch],
    checkpointing: Checkpointing,
    compute: torch.dtype | None,
) -> None:
    """One backward pass at the model as it is; every weight's switches take its gradient as it comes."""

    def take(weight: Weight, gradient: Tensor) -> None:
        switches[weight.name].take(gradient)

    _all(switches, Switches.forget)
    with gradients_to(model, [s.weight for s in switches.values()], take, checkpointing=checkpointing):
        backward(model, batches, compute)


def _all(switches: dict[str, Switches], do: Callable[[Switches], None]) -> None:
    for switch in switches.values():
        do(switch)


def _switch(switches: dict[str, Switches], curvature: Curvature, most: int) -> dict[str, Tensor]:
    """Switch to the ``most`` highest scores above 0 being off; returns their positions, by weight."""
    picked = strongest([s.scores(curvature) for s in switches.values()], most)
    mask = {}
    for (name, switch), numbers in zip(switches.items(), picked, strict=True):
        where = switch.places(numbers)
        switch.switch(where)
        if len(where):
            mask[name] = where
    return mask
