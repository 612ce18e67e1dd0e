"""Signed purification: switch off the weights whose removal lowers the loss, greedily (`docs/methods.md`).

To first order, switching w off changes the loss L by -w * dL/dw; beyond, by w^2 h / 2 (`curvature`); and a gradient of n
tokens is uncertain by sqrt(h / n). The weights that gain most when all three are counted are the noise weights. Each round
takes the gradient at the model as it is by then, switches off the top of the ranking, and looks at documents that gave no
gradient. A round that makes these worse by more than it promised to make them better is taken back, and the next one is
half as large; when they no longer improve, the best round is kept. No weight is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from freemoe.core.errors import DataError, NumericError, RecipeError
from freemoe.domain_experts.purify.batches import AnswerBatch, mean_loss
from freemoe.domain_experts.purify.curvature import Curvature, Forecast, forecast, measure_curvature
from freemoe.domain_experts.purify.gradients import Checkpointing, noise_weights
from freemoe.models.mask import Mask
from freemoe.models.switching import Undo, switch_off
from freemoe.models.weights import Weight

# A cut is a tiny share of the weights, so that a tensor can remember many times its fair part of it.
_SPREAD = 256

OnRound = Callable[[int, float, float], None]
"""Called with the round, the stopping loss and the share that is off, e.g. to draw progress."""


@dataclass(frozen=True)
class Purified:
    """What a purification found.

    Attributes:
        mask: Switched-off weights.
        losses: Loss on the stopping documents, in nats per answer token: the base's, then one per round.
        best: Round that is kept; 0 is the base, and then nothing is switched off.
        forecast: What the gradient of the base makes of this mask on stopping documents; None where none is off.
    """

    mask: Mask
    losses: tuple[float, ...]
    best: int
    forecast: Forecast | None = None


def check_input(gradient: Sequence[AnswerBatch], stop: Sequence[AnswerBatch], budget: float) -> None:
    """Check what every way of purifying is given.

    Raises:
        DataError: When one of the two lists is empty.
        RecipeError: When the budget is not a share of the weights.
    """
    if not gradient or not stop:
        raise DataError(
            f"Signed purification needs documents for gradients and others for stopping; got {len(gradient)} and "
            f"{len(stop)} batches. Raise --limit or use fewer subdomains."
        )
    if not 0 < budget <= 1:
        raise RecipeError(f"saliency.budget is {budget}: a share of the weights above 0 and at most 1, e.g. 0.01.")


def split_batches(batches: Sequence[AnswerBatch], tokens: int) -> list[list[AnswerBatch]]:
    """Deal batches into parts of about ``tokens`` answer tokens; one part where there are fewer than two times that."""
    count = max(1, min(len(batches), sum(b.answer_tokens for b in batches) // tokens))
    return [list(batches[i::count]) for i in range(count)]


def toll_of(curvature: Curvature, tokens: int) -> Callable[[Weight], Tensor]:
    """What must be taken off w * dL/dw, by weight: w^2 h / 2 beyond first order, and |w| sqrt(h / n) of uncertainty.

    Args:
        curvature: The curvature h.
        tokens: Answer tokens n that the gradient is a mean over.
    """

    def toll(weight: Weight) -> Tensor:
        return curvature.disturbance(weight).add_(curvature.cost(weight), alpha=tokens**-0.5)

    return toll


def purify(
    model: Any,
    weights: Sequence[Weight],
    gradient: Sequence[AnswerBatch],
    stop: Sequence[AnswerBatch],
    *,
    step: float = 5e-5,
    budget: float = 0.01,
    patience: int = 8,
    part_tokens: int = 12288,
    checkpointing: Checkpointing = False,
    on_round: OnRound | None = None,
) -> Purified:
    """Find the weights to switch off for one subdomain; the model is bit-equal afterwards.

    Args:
        model: A causal LM.
        weights: Weights that may be switched off.
        gradient: Documents that rank the weights.
        stop: Other documents, which say when to stop.
        step: Share of ``weights`` switched off per round.
        budget: Largest share that may be off in the end.
        patience: Rounds without a better stopping loss before the search ends.
        part_tokens: A round takes its gradient documents in parts of about so many answer tokens. Each part ranks anew
            and switches off its share of the step: many small cuts by different documents follow the loss better than
            one large cut by all of them, at the same cost.
        checkpointing: As for ``gradients_to``.
        on_round: Told after every round.

    Raises:
        DataError: When one of the two lists is empty.
        RecipeError: When the budget is not in (0, 1].
        NumericError: When a loss or gradient is NaN or infinite; says in which round.
    """
    check_input(gradient, stop, budget)
    total = sum(w.size for w in weights)
    parts = split_batches(gradient, part_tokens)
    per_part = max(1, round(step * total / len(parts)))
    rounds: list[Round] = []
    losses = [mean_loss(model, stop)]
    before = losses[0]
    best, off, number = 0, 0, 0
    kept = Mask()
    try:
        curvature = measure_curvature(model, weights, parts[0], checkpointing=checkpointing)
        while off < int(budget * total):
            number += 1
            rounds.append(Round())
            for part in parts:
                room = min(per_part, int(budget * total) - off - rounds[-1].off)
                toll = toll_of(curvature, sum(b.answer_tokens for b in part))
                found = noise_weights(
                    model, weights, part, room, spread=_SPREAD, toll=toll, checkpointing=checkpointing
                )
                rounds[-1].cut(weights, *found)
            if not rounds[-1].off:
                break
            losses.append(mean_loss(model, stop))
            if on_round:
                on_round(number, losses[-1], (off + rounds[-1].off) / total)
            if losses[-1] < losses[best]:
                best = number
                kept = joined(rounds)
            if number - best >= patience:
                break
            if losses[-1] - before > rounds[-1].promise:
                rounds.pop().restore()
                per_part = max(1, per_part // 2)
            else:
                before = losses[-1]
            off = sum(r.off for r in rounds)
    except NumericError as error:
        raise NumericError(f"Greedy purification, round {number}, {off} weights off: {error}") from None
    finally:
        for done in reversed(rounds):
            done.restore()
    expected = forecast(model, weights, kept, curvature, stop, checkpointing=checkpointing)
    return Purified(kept, tuple(losses), best, expected)


@dataclass(eq=False)
class Round:
    """What one round switched off, and what it promised.

    Attributes:
        cuts: What is off, one for every part of the documents.
        undos: The ways back, likewise.
        promise: Gain in nats per token that the gradients named.
        off: Weights that it switched off.
    """

    cuts: list[Mask] = field(default_factory=list)
    undos: list[Undo] = field(default_factory=list)
    promise: float = 0.0
    off: int = 0

    def cut(self, weights: Sequence[Weight], mask: Mask, promise: float) -> None:
        """Switch weights off."""
        self.undos.append(switch_off(weights, mask))
        self.cuts.append(mask)
        self.promise += promise
        self.off += mask.count

    def restore(self) -> None:
        """Switch them on again."""
        for undo in reversed(self.undos):
            undo.restore()


def joined(rounds: Sequence[Round]) -> Mask:
    """What several rounds have off together."""
    return Mask().union(*(cut for r in rounds for cut in r.cuts))
