"""Signed purification with learned switches: which weights are off is trained, no value is (`docs/methods.md`).

A candidate weight w has a score s and counts as w * [s >= 0]. The gradient passes the step function as if it were the
identity (straight-through), so that dL/ds = w * dL/d(w * [s >= 0]): the signed score again, but taken at the masked
model, for weights that are off as well as for those that are on. A weight that is off can thus come back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.domain_experts.batches import AnswerBatch, answer_batches, mean_loss, rows_of
from freemoe.domain_experts.gradients import backward, finite, gradients_to, noise_weights, strongest
from freemoe.domain_experts.saliency import OnRound, Purified, check_input
from freemoe.domain_experts.switching import count, switched_off
from freemoe.errors import NumericError, RecipeError
from freemoe.families.weights import Weight

# Scores start at +START and stay within [-START, START].
START = 0.3
_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
_SPREAD = 2


@dataclass(eq=False)
class Switches:
    """The candidates of one weight and the state of their training, fp32, ``(n,)`` each.

    Attributes:
        weight: The weight they belong to.
        positions: Sorted flat positions in (experts, rows, columns) order, int64.
        scores: Below 0 the candidate wants to be off.
        mean: Adam's running mean of the gradient of the scores.
        square: Adam's running mean of its square.
    """

    weight: Weight
    positions: Tensor
    scores: Tensor
    mean: Tensor
    square: Tensor

    @staticmethod
    def all_on(weight: Weight, positions: Tensor) -> Switches:
        """Candidates that are on."""
        zeros = torch.zeros(len(positions), device=positions.device)
        return Switches(weight, positions, zeros + START, zeros, zeros.clone())


def off(switches: Sequence[Switches], most: int) -> dict[str, Tensor]:
    """Positions of the candidates that are off: those with scores below 0, and of these the ``most`` lowest."""
    picked = strongest([-s.scores for s in switches], most)
    return {s.weight.name: s.positions[at] for s, at in zip(switches, picked, strict=True) if len(at)}


def adam(switch: Switches, gradient: Tensor, rate: float, step: int) -> None:
    """One step of Adam on the scores, in place.

    Args:
        switch: The candidates of one weight.
        gradient: ``(n,)`` dL/ds.
        rate: Learning rate.
        step: Number of the step, from 1.
    """
    first, second = _BETAS
    switch.mean.lerp_(gradient, 1 - first)
    switch.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    size = (switch.square / (1 - second**step)).sqrt_().add_(_EPSILON)
    switch.scores.addcdiv_(switch.mean, size, value=-rate / (1 - first**step)).clamp_(-START, START)


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
    count = max(1, round(tokens * len(rows) / sum(len(answer) for _, answer in rows)))
    while True:
        order = generator.sample(rows, len(rows))
        # A rest that makes no whole step waits for another pass, so that all steps weigh the same.
        for first in range(0, max(1, len(order) - count + 1), count):
            chosen = order[first : first + count]
            yield answer_batches(chosen, [0] * len(chosen), limit, device)


def learn(
    model: Any,
    weights: Sequence[Weight],
    gradient: Sequence[AnswerBatch],
    stop: Sequence[AnswerBatch],
    *,
    budget: float = 0.01,
    candidates: float = 0.1,
    steps: int = 1000,
    rate: float = 3e-3,
    step_tokens: int = 2048,
    every: int = 50,
    patience: int = 6,
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
        budget: Largest share of ``weights`` that is ever off.
        candidates: Share of ``weights`` that gets a switch: those with the largest positive w * dL/dw of the base.
        steps: Most steps of training.
        rate: Learning rate of Adam.
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
    most = int(budget * total)
    losses = [mean_loss(model, stop)]
    best, kept, waited = 0, dict[str, Tensor](), 0
    where = noise_weights(
        model, weights, gradient, int(candidates * total), spread=_SPREAD, checkpointing=checkpointing
    )
    switches = [Switches.all_on(w, where[w.name]) for w in weights if w.name in where]
    gathered: dict[str, Tensor] = {}

    def take(weight: Weight, gradient: Tensor) -> None:
        entries = finite(gradient.reshape(-1)[where[weight.name]].float(), weight)
        gathered[weight.name] = gathered[weight.name] + entries if weight.name in gathered else entries

    step, mask = 0, dict[str, Tensor]()
    steps_of = draw(gradient, step_tokens, seed)
    try:
        with gradients_to(model, [s.weight for s in switches], take, checkpointing=checkpointing):
            for step in range(1, steps + 1 if switches else 1):
                with switched_off(weights, mask):
                    backward(model, next(steps_of))
                for switch in switches:
                    if switch.weight.name in gathered:
                        values = switch.weight.view().reshape(-1)[switch.positions].float()
                        adam(switch, values * gathered.pop(switch.weight.name), rate, step)
                mask = off(switches, most)
                if step % every and step < steps:
                    continue
                with switched_off(weights, mask):
                    losses.append(mean_loss(model, stop))
                if losses[-1] < losses[best]:
                    best, kept = len(losses) - 1, mask
                if on_round:
                    on_round(len(losses) - 1, losses[-1], count(mask) / total)
                waited += bool(mask)
                if waited and len(losses) - 1 - best >= patience and waited >= patience:
                    break
    except NumericError as error:
        raise NumericError(f"Learned switches, step {step}, {count(mask)} weights off: {error}") from None
    return Purified({name: p.cpu() for name, p in kept.items()}, tuple(losses), best)
