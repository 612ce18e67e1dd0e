"""Signed purification with learned switches: which weights are off is trained, no value is (`docs/methods.md`).

A candidate weight w has a score s and counts as w * [s >= 0]. The gradient passes the step function as if it were the
identity (straight-through), so that dL/ds = w * dL/d(w * [s >= 0]): the signed score again, but taken at the masked
model, for weights that are off as well as for those that are on. A weight that is off can thus come back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.domain_experts.batches import AnswerBatch, answer_batches, mean_loss, rows_of
from freemoe.domain_experts.gradients import Leaders, backward, finite, gradients_to, noise_weights, strongest
from freemoe.domain_experts.saliency import OnRound, Purified, check_input
from freemoe.domain_experts.switching import count, switched_off
from freemoe.errors import NumericError, RecipeError
from freemoe.families.weights import Weight

# Adam's two memories of the gradient.
_BETAS = (0.9, 0.999)
# The budget opens over the first part of the training; candidates are exchanged up to the later one.
_OPEN, _EXCHANGE = 1 / 6, 0.7
# Steps at the end of a round whose gradients rank the weights that are no candidates.
_WATCHED = 8
# Leaders that a tensor remembers, as a multiple of its fair part.
_SPREAD = 2
STATE_BYTES = 24
"""Memory of a candidate: its position, its score and two means, and its gradient during a step."""


@dataclass(eq=False)
class Switches:
    """The candidates of one weight and the state of their training, fp32, ``(n,)`` each.

    Attributes:
        weight: The weight they belong to.
        positions: Sorted flat positions in (experts, rows, columns) order, int64.
        scores: Below 0 the candidate wants to be off.
        mean: Running mean of the gradient of the scores.
        square: Running mean of its square.
    """

    weight: Weight
    positions: Tensor
    scores: Tensor
    mean: Tensor
    square: Tensor

    @staticmethod
    def fresh(weight: Weight, positions: Tensor) -> Switches:
        """Candidates that are on and know nothing yet."""
        return Switches(weight, positions, *(torch.zeros(len(positions), device=positions.device) for _ in range(3)))

    def merged(self, keep: Tensor, positions: Tensor) -> Switches:
        """The candidates numbered ``keep`` with fresh ones at ``positions``."""
        fresh = Switches.fresh(self.weight, positions.to(self.positions.device))
        where = torch.cat([self.positions[keep], fresh.positions])
        order = where.argsort()
        pairs = ((self.scores, fresh.scores), (self.mean, fresh.mean), (self.square, fresh.square))
        return Switches(self.weight, where[order], *(torch.cat([old[keep], new])[order] for old, new in pairs))


def off(switches: Sequence[Switches], most: int) -> dict[str, Tensor]:
    """Positions of the candidates that are off: those with scores below 0, and of these the ``most`` lowest."""
    picked = strongest([-s.scores for s in switches], most)
    return {s.weight.name: s.positions[at] for s, at in zip(switches, picked, strict=True) if len(at)}


def train_step(switches: Sequence[Switches], gradients: dict[str, Tensor], step: int, steps: int) -> None:
    """Move the scores, in place: Adam with one floor for all candidates, slower and slower.

    A weight with a large gradient shall move further than one with a small gradient, but not in proportion: so the root
    mean square over all candidates stands beside each one's own, where Adam has its epsilon. Nothing but the order of
    scores and their sign is ever used, so that there is no learning rate to choose.

    Args:
        switches: Candidates, by weight.
        gradients: Name of the weight to ``(n,)`` dL/ds of its candidates; absent where no gradient came.
        step: Number of the step, from 1.
        steps: Number of the last.
    """
    first, second = _BETAS
    for switch in switches:
        gradient = gradients.get(switch.weight.name)
        if gradient is None:
            gradient = torch.zeros_like(switch.scores)
        switch.mean.lerp_(gradient, 1 - first)
        switch.square.lerp_(gradient * gradient, 1 - second)
    number = sum(len(s.scores) for s in switches)
    unbias = 1 - second**step
    floor = math.sqrt(sum(float(s.square.sum(dtype=torch.float64)) for s in switches) / number / unbias)
    if floor == 0:
        return
    pace = 0.5 * (1 + math.cos(math.pi * step / steps)) / (1 - first**step)
    for switch in switches:
        switch.scores.addcdiv_(switch.mean, (switch.square / unbias).sqrt_().add_(floor), value=-pace)


def exchange(switches: Sequence[Switches], leaders: Leaders, most: int) -> list[Switches]:
    """Give the half of the candidates that is least likely to go off, to weights that now look better.

    Args:
        switches: Candidates of every weight, some perhaps with none.
        leaders: Ranking of the weights that are no candidates.
        most: Candidates that may be off; they stay.
    """
    number = sum(len(s.scores) for s in switches)
    fresh = leaders.positions()
    keep = max(most, number - min(number // 2, count(fresh)))
    kept = strongest([-s.scores for s in switches], keep, above=-math.inf)
    none = torch.empty(0, dtype=torch.long)
    return [s.merged(at, fresh.get(s.weight.name, none)) for s, at in zip(switches, kept, strict=True)]


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


def learn(
    model: Any,
    weights: Sequence[Weight],
    gradient: Sequence[AnswerBatch],
    stop: Sequence[AnswerBatch],
    *,
    budget: float = 0.01,
    candidates: float = 0.1,
    steps: int = 600,
    step_tokens: int = 2048,
    every: int = 50,
    patience: int = 8,
    seed: int = 0,
    checkpointing: bool = False,
    on_round: OnRound | None = None,
) -> Purified:
    """Train which weights are off for one subdomain; the model is bit-equal afterwards.

    Args:
        model: A causal LM.
        weights: Weights that may be switched off.
        gradient: Documents that train the switches.
        stop: Other documents, which say when to stop and what to keep.
        budget: Largest share of ``weights`` that is ever off; it opens over the first sixth of the steps.
        candidates: Share of ``weights`` that has a switch at a time: at first those with the largest positive
            w * dL/dw of the base; after a round, half of them make room for what is largest at the masked model.
        steps: Most steps of training.
        step_tokens: Answer tokens of a step, about.
        every: Steps between two looks at the stopping loss: a round.
        patience: Rounds without a better stopping loss before the training ends, counted from the first weight off.
        seed: Of the order of documents.
        checkpointing: Whether layers make their activations again in the backward pass, for memory.
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
    total = sum(w.size for w in weights)
    most, number = int(budget * total), int(candidates * total)
    losses = [mean_loss(model, stop)]
    best, waited, step = 0, 0, 0
    kept: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    try:
        none = torch.empty(0, dtype=torch.long, device=weights[0].parameter.device)
        where = noise_weights(model, weights, gradient, number, spread=_SPREAD, checkpointing=checkpointing)
        switches = [Switches.fresh(w, where.get(w.name, none)) for w in weights]
        drawn = draw(gradient, step_tokens, seed)
        leaders: Leaders | None = None
        for step in range(1, steps + 1 if where and most else 1):
            # The last steps of a round also rank what is no candidate, from gradients that are there anyway.
            if (step + min(_WATCHED, every) - 1) % every == 0 and step <= _EXCHANGE * steps and number < total:
                known = {s.weight.name: s.positions for s in switches}
                leaders = Leaders(weights, number // 2, _SPREAD, known)
            with switched_off(weights, mask):
                slopes = _slopes(model, switches, next(drawn), leaders, checkpointing)
            for switch in switches:
                if switch.weight.name in slopes:
                    slopes[switch.weight.name] *= switch.weight.view().reshape(-1)[switch.positions].float()
            train_step(switches, slopes, step, steps)
            mask = off(switches, math.ceil(most * (1 - max(0.0, 1 - step / (steps * _OPEN)) ** 3)))
            if step % every and step < steps:
                continue
            with switched_off(weights, mask):
                losses.append(mean_loss(model, stop))
            if on_round:
                on_round(len(losses) - 1, losses[-1], count(mask) / total)
            waited += bool(mask)
            if losses[-1] < losses[best]:
                best, kept, waited = len(losses) - 1, mask, 0
            if waited >= patience:
                break
            if leaders is not None:
                switches, leaders = exchange(switches, leaders, most), None
    except NumericError as error:
        raise NumericError(f"Learned switches, step {step}, {count(mask)} weights off: {error}") from None
    return Purified({name: p.cpu() for name, p in kept.items()}, tuple(losses), best)


def _slopes(
    model: Any,
    switches: Sequence[Switches],
    batches: Sequence[AnswerBatch],
    leaders: Leaders | None,
    checkpointing: bool,
) -> dict[str, Tensor]:
    """dL/dw of every candidate at the model as it is, by weight; ``leaders`` see every gradient too."""
    by_name = {s.weight.name: s for s in switches}
    gathered: dict[str, Tensor] = {}

    def take(weight: Weight, gradient: Tensor) -> None:
        entries = finite(gradient.reshape(-1)[by_name[weight.name].positions].float(), weight)
        gathered[weight.name] = gathered[weight.name] + entries if weight.name in gathered else entries
        if leaders is not None:
            leaders.take(weight, gradient)

    asked = [s.weight for s in switches if len(s.positions) or leaders is not None]
    with gradients_to(model, asked, take, checkpointing=checkpointing):
        backward(model, batches)
    return gathered
