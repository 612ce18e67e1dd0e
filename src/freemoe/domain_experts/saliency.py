"""Signed purification: switch off the weights whose removal lowers the loss, greedily (`docs/methods.md`).

To first order, switching w off changes the loss L by -w * dL/dw. The weights with the largest positive product are the
noise weights. Each round takes the gradient at the model as it is by then, switches off the top of the ranking, and
looks at documents that gave no gradient; when those no longer improve, the best round is kept. No weight is updated.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.domain_experts.batches import AnswerBatch, answer_loss, mean_loss
from freemoe.domain_experts.importance import METRICS
from freemoe.domain_experts.switching import Undo, switch_off
from freemoe.errors import DataError, NumericError
from freemoe.families.weights import Weight

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Purified:
    """What a greedy purification found.

    Attributes:
        positions: Switched-off weights: name -> sorted flat positions in (experts, rows, columns) order.
        losses: Loss on the stopping documents, in nats per answer token: the base's, then one per round.
        best: Round that is kept; 0 is the base, and then nothing is switched off.
    """

    positions: dict[str, Tensor]
    losses: tuple[float, ...]
    best: int


@contextlib.contextmanager
def _only_these_need_gradients(model: Any, weights: Sequence[Weight]) -> Iterator[None]:
    """Ask for gradients of the given weights alone; leave flags and gradients as they were."""
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    try:
        for p, _, _ in before:
            p.requires_grad_(False)
            p.grad = None
        for weight in weights:
            weight.parameter.requires_grad_(True)
        yield
    finally:
        for p, flag, grad in before:
            p.requires_grad_(flag)
            p.grad = grad


def strongest(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """The ``count`` largest positive scores over all tensors together.

    Args:
        scores: Flat scores of each tensor.
        count: How many to pick at most.

    Returns:
        For every tensor the sorted positions that were picked; equal scores go to the earlier tensor and position.
    """
    if count < 1:
        return [torch.empty(0, dtype=torch.long, device=flat.device) for flat in scores]
    tops = [torch.topk(flat, min(count, flat.numel())).values.cpu() for flat in scores]
    together = torch.cat(tops)
    # The last value that gets in. topk promises no order among equals, so those at the line are taken by place.
    line = torch.topk(together, min(count, together.numel())).values[-1].clamp(min=0)
    room = count - int((together > line).sum())
    picked = []
    for flat in scores:
        above = (flat > line).nonzero().flatten()
        if float(line) > 0 and room > 0:
            at = (flat == line).nonzero().flatten()[:room]
            room -= len(at)
            above = torch.cat([above, at]).sort().values
        picked.append(above)
    return picked


def split_batches(batches: Sequence[AnswerBatch], tokens: int) -> list[list[AnswerBatch]]:
    """Deal batches into parts of about ``tokens`` answer tokens; one part where there are fewer than two times that."""
    count = max(1, min(len(batches), sum(b.answer_tokens for b in batches) // tokens))
    return [list(batches[i::count]) for i in range(count)]


def signed_scores(model: Any, weights: Sequence[Weight], batches: Sequence[AnswerBatch]) -> list[Tensor]:
    """W * dL/dW of every weight, flat in (experts, rows, columns) order; L is the mean answer cross-entropy."""
    tokens = sum(b.answer_tokens for b in batches)
    for weight in weights:
        weight.parameter.grad = None
    for batch in batches:
        (answer_loss(model, batch) / tokens).backward()
    scores = []
    for weight in weights:
        gradient = weight.parameter.grad
        if gradient is None:
            scores.append(torch.zeros(weight.size, device=weight.parameter.device))
            continue
        if not bool(torch.isfinite(gradient).all()):
            raise NumericError(
                f"The gradient of {weight.name!r} is NaN or infinite. Try --dtype float32; half precision can overflow."
            )
        canonical = weight.arrange(gradient)
        scores.append(METRICS.get("saliency").scores(weight.view().detach(), None, canonical, None).flatten())
        weight.parameter.grad = None
    return scores


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
    on_round: Callable[[int, float, float], None] | None = None,
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
        on_round: Called with round, stopping loss and share off, e.g. to draw progress.

    Raises:
        DataError: When one of the two lists is empty.
        NumericError: When a loss or gradient is NaN or infinite.
    """
    if not gradient or not stop:
        raise DataError(
            f"Signed purification needs documents for gradients and others for stopping; got {len(gradient)} and "
            f"{len(stop)} batches. Raise --limit or use fewer subdomains."
        )
    total = sum(w.size for w in weights)
    parts = split_batches(gradient, part_tokens)
    per_part = max(1, round(step * total / len(parts)))
    undos: list[Undo] = []
    rounds: list[list[dict[str, Tensor]]] = []
    try:
        losses = [mean_loss(model, stop)]
        best, off = 0, 0
        with _only_these_need_gradients(model, weights):
            while off < int(budget * total):
                before = off
                found: list[dict[str, Tensor]] = []
                for part in parts:
                    room = min(per_part, int(budget * total) - off)
                    picked = strongest(signed_scores(model, weights, part), room)
                    chosen = {w.name: p for w, p in zip(weights, picked, strict=True) if len(p)}
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
    finally:
        for undo in reversed(undos):
            undo.restore()
    kept: dict[str, Tensor] = {}
    for weight in weights:
        places = [cut[weight.name] for found in rounds[:best] for cut in found if weight.name in cut]
        if places:
            kept[weight.name] = torch.cat(places).sort().values.cpu()
    return Purified(kept, tuple(losses), best)
