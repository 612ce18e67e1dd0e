"""Signed purification: switch off the weights whose removal lowers the loss, greedily (`docs/methods.md`).

To first order, switching w off changes the loss L by -w * dL/dw. The weights with the largest positive product are the
noise weights. Each round takes the gradient at the model as it is by then, switches off the top of the ranking, and
looks at documents that gave no gradient; when those no longer improve, the best round is kept. No weight is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.domain_experts.batches import AnswerBatch, mean_loss
from freemoe.domain_experts.gradients import noise_weights
from freemoe.domain_experts.switching import Undo, switch_off
from freemoe.errors import DataError, NumericError, RecipeError
from freemoe.families.weights import Weight

# A cut is a tiny share of the weights, so that a tensor can remember many times its fair part of it.
_SPREAD = 256

OnRound = Callable[[int, float, float], None]
"""Called with the round, the stopping loss and the share that is off, e.g. to draw progress."""


@dataclass(frozen=True)
class Purified:
    """What a purification found.

    Attributes:
        positions: Switched-off weights: name -> sorted flat positions in (experts, rows, columns) order.
        losses: Loss on the stopping documents, in nats per answer token: the base's, then one per round.
        best: Round that is kept; 0 is the base, and then nothing is switched off.
    """

    positions: dict[str, Tensor]
    losses: tuple[float, ...]
    best: int


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
    checkpointing: bool = False,
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
        checkpointing: Whether layers make their activations again in the backward pass, for memory.
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
    undos: list[Undo] = []
    rounds: list[list[dict[str, Tensor]]] = []
    losses = [mean_loss(model, stop)]
    best, off = 0, 0
    try:
        while off < int(budget * total):
            before = off
            found: list[dict[str, Tensor]] = []
            for part in parts:
                room = min(per_part, int(budget * total) - off)
                chosen = noise_weights(model, weights, part, room, spread=_SPREAD, checkpointing=checkpointing)
                undos.append(switch_off(weights, chosen))
                found.append(chosen)
                off += sum(len(p) for p in chosen.values())
            if off == before:
                break
            rounds.append(found)
            losses.append(mean_loss(model, stop))
            if losses[-1] < losses[best]:
                best = len(losses) - 1
            if on_round:
                on_round(len(losses) - 1, losses[-1], off / total)
            if len(losses) - 1 - best >= patience:
                break
    except NumericError as error:
        raise NumericError(f"Greedy purification, round {len(rounds) + 1}, {off} weights off: {error}") from None
    finally:
        for undo in reversed(undos):
            undo.restore()
    kept: dict[str, Tensor] = {}
    for weight in weights:
        places = [cut[weight.name] for found in rounds[:best] for cut in found if weight.name in cut]
        if places:
            kept[weight.name] = torch.cat(places).sort().values.cpu()
    return Purified(kept, tuple(losses), best)
