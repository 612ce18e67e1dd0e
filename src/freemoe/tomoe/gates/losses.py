"""What a conversion asks for beside the dense model's predictions, as functions of tensors (ToMoE Eq. 8-10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def log_ratio(x: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """f(x, y) = log(max(x, y) / min(x, y)): zero where they agree, the same either way round (ToMoE Eq. 8).

    Args:
        x: (...), positive.
        y: (...), positive.
        smoothing: Added to both inside the logarithm.
    """
    return torch.log((torch.maximum(x, y) + smoothing) / (torch.minimum(x, y) + smoothing))


def size_loss(active: Tensor, share: float, smoothing: float = 0.0) -> Tensor:
    """R_P: how far the active share () of the weights is from the wanted one, either way (ToMoE Eq. 8)."""
    return log_ratio(active, torch.full_like(active, share), smoothing)


class _MaskUnion(torch.autograd.Function):
    """The product's own gradient asks the host whether there are zeros; here numbers are zero or one."""

    @staticmethod
    def forward(ctx: Any, masks: Tensor) -> Tensor:
        ctx.save_for_backward(masks)
        return 1 - (1 - masks).prod(dim=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (masks,) = ctx.saved_tensors
        return grads[0] * (masks.sum(dim=0) == masks)


def mask_union(masks: Tensor) -> Tensor:
    """U = 1 - prod_i (1 - s_i): what some mask keeps. (masks, width) of zeros and ones -> (width,) (ToMoE Eq. 6 and 16)."""
    return _MaskUnion.apply(masks)  # pyright: ignore[reportReturnType]


def union_loss(mask: Tensor, smoothing: float = 0.0) -> Tensor:
    """R_U of one layer: the share of a union (width,) against one (ToMoE Eq. 7)."""
    covered = mask.mean()
    return log_ratio(covered, torch.ones_like(covered), smoothing)


def balance_loss(chosen: Tensor, probabilities: Tensor, form: str = "soft") -> Tensor:
    """R_L of one layer: one where tokens spread evenly over experts, larger where they crowd (ToMoE Eq. 9).

    Args:
        chosen: (tokens, experts), one-hot, with or without a gradient.
        probabilities: (tokens, experts), softmax of the router, or its Gumbel-softmax.
        form: ``soft`` and ``gumbel``: N sum_i F_i P_i; ``hard``: sum_i F_i F_i with the one-hot's gradient, the authors'
            code, whose even value is 1 / N.
    """
    share = chosen.mean(dim=0)
    if form == "hard":
        return (share.detach() * share).sum()
    return chosen.shape[1] * (share.detach() * probabilities.mean(dim=0)).sum()
