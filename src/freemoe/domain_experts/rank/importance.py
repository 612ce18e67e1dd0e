"""Importance of weights: one pure function per metric (MoDE Eq. 5; Free-MoE Eq. 4), by name in a registry.

Shapes: E fused experts (1 for a plain linear), R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.core.registry import Registry
from freemoe.domain_experts.recipe import METRICS as NAMES


@dataclass(frozen=True)
class Metric:
    """How weights are ranked.

    Attributes:
        scores: ``(weight (E, R, C) fp32, norm (E, C) fp32, gradient (E, R, C) fp32, generator) -> (E, R, C)`` fp32;
            arguments that the metric does not need are None.
        needs: What it needs beside the weights: input ``norms``, ``gradients``, a ``seed``, or ``nothing``.
    """

    scores: Callable[[Tensor, Tensor | None, Tensor | None, torch.Generator | None], Tensor]
    needs: Literal["norms", "gradients", "seed", "nothing"]


METRICS: Registry[Metric] = Registry("metric", NAMES)


def wanda_importance(weight: Tensor, norm: Tensor | None, gradient: Tensor | None, generator: object = None) -> Tensor:
    """|W_ij| * ||X_j||_p (MoDE Eq. 5 with patches of one weight).

    One IEEE multiplication per weight in fp32: the same bits on every device.
    """
    assert norm is not None
    return weight.float().abs().mul_(norm.float()[:, None, :])


def random_importance(
    weight: Tensor, norm: Tensor | None, gradient: Tensor | None, generator: torch.Generator | None = None
) -> Tensor:
    """Uniform noise: the control. Drawn on the CPU, so that a seed means the same ranking everywhere."""
    assert generator is not None
    return torch.rand(weight.shape, generator=generator, dtype=torch.float32).to(weight.device)


def saliency_importance(
    weight: Tensor, norm: Tensor | None, gradient: Tensor | None, generator: object = None
) -> Tensor:
    """W_ij * dL/dW_ij: switching w_ij off changes the loss by minus this, to first order.

    Signed: the largest positive values are the weights that hurt.
    """
    assert gradient is not None
    return weight.float() * gradient.float()


METRICS.add("wanda", Metric(wanda_importance, "norms"), "|W| * ||X||_p, the papers' metric (MoDE Eq. 5)")
METRICS.add("magnitude", Metric(lambda weight, *_: weight.float().abs(), "nothing"), "|W|, needs no data")
METRICS.add("random", Metric(random_importance, "seed"), "uniform noise, the control")
METRICS.add("saliency", Metric(saliency_importance, "gradients"), "signed W * dL/dW: signed purification (ours)")


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """A generator of its own for a tensor, from the run's seed and the tensor's name."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
    return torch.Generator().manual_seed(mixed)


def patch_scores(scores: Tensor, side: int) -> Tensor:
    """Sum scores over patches of ``side`` x ``side`` weights, ragged edges padded with zeros (MoDE Eq. 5).

    Summed by adding one shifted grid after the other, so that the order of additions, and with it every bit, is the
    same on every device.

    Args:
        scores: ``(E, R, C)`` fp32.
        side: Side of a patch (alpha).

    Returns:
        ``(E, ceil(R / side), ceil(C / side))`` fp32.
    """
    if side == 1:
        return scores
    _, rows, columns = scores.shape
    padded = torch.nn.functional.pad(scores, (0, -columns % side, 0, -rows % side))
    total = torch.zeros_like(padded[:, ::side, ::side])
    for i in range(side):
        for j in range(side):
            total = total + padded[:, i::side, j::side]
    return total


def spread_patches(mask: Tensor, side: int, rows: int, columns: int) -> Tensor:
    """Turn a mask over patches ``(E, PR, PC)`` into one over weights ``(E, rows, columns)``."""
    if side == 1:
        return mask
    return mask.repeat_interleave(side, 1).repeat_interleave(side, 2)[:, :rows, :columns]


def check_finite(scores: Tensor, name: str) -> Tensor:
    """Return the scores, or raise when they hold NaN or infinity and cannot be ranked."""
    # One pass without a mask; NaN goes through both bounds.
    if not bool(torch.isfinite(torch.stack(torch.aminmax(scores))).all()):
        bad = int((~torch.isfinite(scores)).sum())
        raise NumericError(
            f"{bad} of {scores.numel()} importance scores of {name!r} are NaN or infinite. The checkpoint or the "
            "calibration text is broken for this model; try --dtype float32."
        )
    return scores
