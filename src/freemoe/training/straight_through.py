"""Hard choices with gradients: exactly zeros and ones going forward, a soft version's gradient going back.

Gumbel-sigmoid and Gumbel-softmax are the paper's (ToMoE Eq. 3, 5 and 6); the k best of a row are ours, for a budget that is
met at every step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from freemoe.kernels.gates import top_k_mask

# P(x + g + b > 0) is above one half from here on, g being standard Gumbel.
MEDIAN_NOISE = -math.log(math.log(2))


class _StraightThroughSigmoid(torch.autograd.Function):
    """Forward ``hard``; backward the gradient of sigmoid(x / tau), of which only y(1 - y) is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hard: Tensor, tau: float) -> Tensor:
        soft = torch.sigmoid(x / tau)
        ctx.save_for_backward(soft * (1 - soft) / tau)
        return hard

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None


class _HardChoice(torch.autograd.Function):
    """Forward one-hot argmax; backward the gradient of softmax(x / tau)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tau: float) -> Tensor:
        soft = torch.softmax(x / tau, dim=-1)
        ctx.save_for_backward(soft)
        ctx.tau = tau
        return torch.zeros_like(x).scatter(-1, x.argmax(dim=-1, keepdim=True), 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (soft,) = ctx.saved_tensors
        inner = (grads[0] * soft).sum(dim=-1, keepdim=True)
        return soft * (grads[0] - inner) / ctx.tau, None


def gumbel_noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard Gumbel noise of a tensor's shape; zeros without a generator."""
    if generator is None:
        return torch.zeros_like(like)
    drawn = torch.rand(like.shape, generator=generator, dtype=torch.float32, device=generator.device)
    # In place: a mask of every token and neuron is as large as what the layer computes.
    return drawn.clamp_(1e-20, 1 - 1e-7).log_().neg_().log_().neg_().to(like)


def gumbel_sigmoid(logits: Tensor, offset: float, tau: float, generator: torch.Generator | None) -> Tensor:
    """Keep where logits + g + b > 0, which has the chance 1 - exp(-exp(x + b)) (ToMoE Eq. 3).

    ``generator`` is of the noise g; without it what is likelier than not is kept. The gradient is y(1 - y) / tau with
    y = sigmoid((x + g + b) / tau).
    """
    noise = gumbel_noise(logits, generator) if generator is not None else MEDIAN_NOISE
    shifted = logits + offset + noise
    return _StraightThroughSigmoid.apply(shifted, (shifted > 0).to(logits.dtype), tau)  # pyright: ignore[reportReturnType]


def gumbel_softmax(logits: Tensor, tau: float, generator: torch.Generator | None) -> Tensor:
    """One-hot of the largest logits + g in every row (..., n); gradient of softmax((x + g) / tau) (ToMoE Eq. 5)."""
    return _HardChoice.apply(logits + gumbel_noise(logits, generator), tau)  # pyright: ignore[reportReturnType]


def gumbel_probabilities(logits: Tensor, tau: float, generator: torch.Generator | None) -> Tensor:
    """softmax((logits + g) / tau) of every row (..., n): what `gumbel_softmax` takes its gradient from (ToMoE Eq. 9's P)."""
    return torch.softmax((logits + gumbel_noise(logits, generator)) / tau, dim=-1)


def hard_top_k(logits: Tensor, k: int, tau: float, generator: torch.Generator | None = None) -> Tensor:
    """Keep exactly the ``k`` best of every row. ``k`` is 1 to n; ``generator`` is of Gumbel noise, if there shall be any.

    Returns:
        (..., n) of zeros and ones; gradient y(1 - y) / tau with y = sigmoid((x - t) / tau), t half-way between the last
        that is kept and the first that is not.
    """
    noisy = logits if generator is None else logits + gumbel_noise(logits, generator)
    fixed = noisy.detach()
    n = logits.shape[-1]
    edge = fixed.topk(min(k + 1, n), dim=-1).values
    threshold = edge[..., k - 1 : k + 1].mean(dim=-1, keepdim=True)
    return _StraightThroughSigmoid.apply(noisy - threshold, top_k_mask(fixed, k), tau)  # pyright: ignore[reportReturnType]
