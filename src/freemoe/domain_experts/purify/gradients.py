"""Gradients of a few weights, handed over tensor by tensor as a backward pass makes them, and dropped at once.

Never more than one weight's gradient is alive. A reader keeps what it needs of each: the largest products, or the
entries of its candidates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from freemoe.core.errors import NumericError
from freemoe.domain_experts.purify.activations import bytes_per_token, fits_in_memory, is_measured, split_by_memory
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_loss, finite_values
from freemoe.domain_experts.purify.strongest import global_topk
from freemoe.domain_experts.rank.importance import METRICS
from freemoe.kernels.waits import numbers_of
from freemoe.models.hooks import combined_hooks, post_accumulate_grad_hook, replace_method
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.spec import family_of, find_layers
from freemoe.models.weights import WeightMatrix, find_weights

# Leaders that even a small matrix remembers: it may hold all of a small cut.
_FEWEST = 1024

Take = Callable[[WeightMatrix, Tensor], None]
"""Reader of a gradient: the weight, and its gradient (experts, rows, columns)."""

Checkpointing = bool | Literal["auto"]
"""Whether layers make their activations again in the backward pass: always, never, or when memory asks for it."""


@contextlib.contextmanager
def gradients_to(
    model: nn.Module, weights: Sequence[WeightMatrix], take: Take, *, checkpointing: Checkpointing
) -> Iterator[None]:
    """Inside, every backward pass hands the gradients of ``weights`` to ``take``; flags and gradients come back after.

    Args:
        model: A causal LM.
        weights: The weights that shall have gradients; nothing else does.
        take: Called once per weight and backward pass. It must not keep the gradient itself, and what it makes of it counts only
            when all is left without an error.
        checkpointing: Whether layers forget their activations and make them again in the backward pass; ``"auto"``: in
            passes whose activations would not fit into half of the free memory.

    Raises:
        NumericError: A gradient was NaN or infinite; names the first such weight.
    """
    if not is_measured(model):
        measure_activations(model)
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]

    finite: list[Tensor] = []
    names: list[str] = []

    def gradient_hook(parameter: Tensor, weight: WeightMatrix) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            # Looked at when all is done: a host that waited for each would leave its device idle.
            finite.append(torch.isfinite(gradient).all())
            names.append(weight.name)
            take(weight, weight.to_canonical(gradient))

    with contextlib.ExitStack() as stack:
        try:
            for p, _, _ in before:
                p.requires_grad_(False)
                p.grad = None
            for weight in weights:
                weight.parameter.requires_grad_(True)
                stack.enter_context(post_accumulate_grad_hook(weight.parameter, partial(gradient_hook, weight=weight)))
            if checkpointing:
                stack.enter_context(_checkpointed_layers(model, checkpointing is True))
            yield
            broken = [name for name, fine in zip(names, numbers_of(finite), strict=True) if not fine]
            if broken:
                raise NumericError(
                    f"The gradient of {broken[0]!r} is NaN or infinite. Try --dtype float32; half precision can overflow."
                )
        finally:
            for p, flag, grad in before:
                p.requires_grad_(flag)
                p.grad = grad


def measure_activations(model: nn.Module) -> None:
    """Let it be known what a token's activations take: with gradients for all weights, and before layers forget what they keep."""
    asked = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in asked:
            p.requires_grad_(False)
        for weight in find_weights(model):
            weight.parameter.requires_grad_(True)
        bytes_per_token(model)
    finally:
        for p, flag in asked:
            p.requires_grad_(flag)


@contextlib.contextmanager
def _checkpointed_layers(model: nn.Module, always: bool) -> Iterator[None]:
    """Run every decoder layer under activation checkpointing, always or in passes that would not fit.

    transformers' own switch acts in training mode only, which would also turn dropout on.
    """
    from torch.utils.checkpoint import checkpoint

    _, layers = find_layers(model, family_of(model))
    forget = always

    def run_layer(forward: Callable[..., Any], first: bool, *args: Any, **kwargs: Any) -> Any:
        nonlocal forget
        # Asked once per pass, by its first layer; a layer that runs again in the backward pass runs below this.
        if first and not always:
            hidden = args[0] if args else kwargs["hidden_states"]
            forget = not fits_in_memory(model, hidden.shape[0], hidden.shape[1])
        if not forget:
            return forward(*args, **kwargs)
        # Nothing random runs in evaluation mode, so no generator's state need be kept for the second run.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    with combined_hooks(
        *(replace_method(layer, partial(run_layer, layer.forward, not i)) for i, layer in enumerate(layers))
    ):
        yield


def backward(model: Any, batches: Sequence[AnswerBatch]) -> float:
    """Take the gradient of the mean answer cross-entropy over all batches together; return it, in nats per token.

    A batch whose activations would take much memory goes in several passes; see `activations.split_by_memory`. The model is
    inside `gradients_to`.

    Raises:
        NumericError: The loss is NaN or infinite.
    """
    tokens = sum(b.answer_tokens for b in batches)
    losses = []
    for batch in batches:
        for part in split_by_memory(model, batch):
            loss = answer_loss(model, part) / tokens
            loss.backward()
            losses.append(loss.detach())
    return sum(finite_values(losses))


class SaliencyTopK:
    """The weights with the largest positive w * dL/dw less a toll, from gradients that come tensor by tensor, batch by batch.

    To first order, switching w off changes the loss L by minus that product; the toll is what it costs beyond. Products are
    summed over the batches, but each tensor remembers the sums of its leaders only. One batch, or leaders that are the whole
    tensor, give the exact answer; otherwise a weight that falls behind for a while loses its sum of before.
    """

    def __init__(
        self,
        weights: Sequence[WeightMatrix],  # The weights to rank
        count: int,  # How many to name at most
        spread: float,  # Leaders of a tensor, as a multiple of its fair part of ``count``; at least 1
        # ``(experts, rows, columns)`` fp32 of a weight, not below 0; None for no toll
        toll: Callable[[WeightMatrix], Tensor] | None = None,
    ) -> None:
        self._count = count
        self._share = spread * count / sum(w.size for w in weights)
        self._toll = toll
        self._names = [w.name for w in weights]
        self._leaders: dict[str, tuple[TensorMask, Tensor]] = {}

    def add_gradient(self, weight: WeightMatrix, gradient: Tensor) -> None:
        """Add one batch's gradient ``(experts, rows, columns)`` of one weight; it is not kept."""
        gains = METRICS.get("saliency").scores(weight.canonical_view(), None, gradient, None).flatten()
        scores = gains if self._toll is None else gains - self._toll(weight).flatten()
        if weight.name in self._leaders:
            # Their sums have paid the toll.
            where, sums = self._leaders[weight.name]
            where.scatter_values(scores, where.gather_values(gains) + sums)
        keep = min(weight.size, max(math.ceil(self._share * weight.size), _FEWEST))
        # Where torch looks for the largest it takes sixteen bytes for each of all scores.
        (where,) = global_topk([lambda: scores], keep, above=-math.inf).masks
        self._leaders[weight.name] = where, where.gather_values(scores)

    def select_weights(self) -> tuple[Mask, float]:
        """The weights, and the sum of their scores."""
        reached = [name for name in self._names if name in self._leaders]
        leaders = [self._leaders[name] for name in reached]
        picked = global_topk([lambda sums=sums: sums for _, sums in leaders], self._count).masks
        found, gains = {}, []
        for name, at, (where, sums) in zip(reached, picked, leaders, strict=True):
            found[name] = at.expand_into(where)
            gains.append(at.gather_values(sums).sum(dtype=torch.float64))
        return Mask(found), sum(numbers_of(gains))


def noise_weights(
    model: Any,
    weights: Sequence[WeightMatrix],
    batches: Sequence[AnswerBatch],
    count: int,
    *,
    spread: float,
    toll: Callable[[WeightMatrix], Tensor] | None = None,
    checkpointing: Checkpointing = False,
) -> tuple[Mask, float]:
    """The ``count`` weights that stand against documents most, in one pass, and what that should gain; see `SaliencyTopK.select_weights`.

    Raises:
        NumericError: When the loss or a gradient is NaN or infinite.
    """
    leaders = SaliencyTopK(weights, count, spread, toll)
    with gradients_to(model, weights, leaders.add_gradient, checkpointing=checkpointing):
        backward(model, batches)
    return leaders.select_weights()
