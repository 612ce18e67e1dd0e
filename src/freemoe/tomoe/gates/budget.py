"""Widths of every sublayer from one budget: the best weights of the whole model by logit, until the share is reached.

A unit is a rotary bit, a value dimension or a neuron's rank within an expert; its price is the weights that it brings
into every token's computation. Units are taken in the order of their logits, which compare across sublayers because they
are worths per weight (`initialise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freemoe.models.sublayers import DecoderSublayers
from freemoe.tomoe.structures.structure import dense_parameters


@dataclass(frozen=True)
class LayerWidths:
    """How much of one layer a token uses."""

    qk: int  # Rotary bits
    vo: int  # Value dimensions of a head, K
    mlp: int  # Neurons of an expert


@dataclass(frozen=True, eq=False)
class LogitProfile:
    """The logits of one layer, each kind in descending order."""

    qk: Tensor  # (bits,), of single bits
    sizes: Tensor  # (bits,), dimensions of each bit, in the same order
    vo: Tensor  # (head_dim,)
    mlp: Tensor  # (width,), mean over experts of the r-th best


def make_profile(qk: Tensor, sizes: Tensor, vo: Tensor, mlp: Tensor) -> LogitProfile:
    """Sort one layer's logits. From ``qk`` (bits,), ``sizes`` (bits,), ``vo`` (head_dim,) and ``mlp`` (experts, width)."""
    order = qk.argsort(descending=True, stable=True)
    means = mlp.sort(dim=-1, descending=True).values.mean(dim=0)
    return LogitProfile(qk[order], sizes[order], vo.sort(descending=True).values, means)


def choose_widths(
    profiles: Sequence[LogitProfile], sublayers: Sequence[DecoderSublayers], share: float, queries: bool = True
) -> list[LayerWidths]:
    """Choose the widths whose weights are the largest share of the dense model's that is not above ``share``.

    Every layer keeps at least one unit of each kind; where that alone is more than the share, it is what is returned.
    Without ``queries`` Q/K lose no dimension.
    """
    logits, prices, owners = [], [], []
    used = 0.0
    for number, (own, layer) in enumerate(zip(profiles, sublayers, strict=True)):
        per_dim = layer.hidden_size * (layer.heads + layer.kv_heads)
        kinds = (
            (own.qk, own.sizes * per_dim),
            (own.vo, torch.full_like(own.vo, per_dim)),
            (own.mlp, torch.full_like(own.mlp, (len(layer.up) + 1) * layer.hidden_size)),
        )
        for kind, (values, price) in enumerate(kinds):
            given = len(values) if kind == 0 and not queries else 1
            used += float(price[:given].sum())
            logits.append(values[given:].float().cpu())
            prices.append(price[given:].double().cpu())
            owners.append(torch.full((len(values) - given,), 3 * number + kind))
    order = torch.cat(logits).argsort(descending=True, stable=True)
    spent = used + torch.cat(prices)[order].cumsum(0)
    # The first unit that does not fit ends it, so that a threshold on the logits separates what is in from what is out.
    taken = int((spent <= share * dense_parameters(sublayers) + 0.5).sum())
    counts = torch.bincount(torch.cat(owners)[order[:taken]], minlength=3 * len(profiles)).tolist()
    return [
        LayerWidths(len(own.qk) if not queries else 1 + counts[3 * n], 1 + counts[3 * n + 1], 1 + counts[3 * n + 2])
        for n, own in enumerate(profiles)
    ]
