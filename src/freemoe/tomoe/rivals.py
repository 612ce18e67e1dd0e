"""What else makes a dense model use half of its weights, without training: the rivals of a learned conversion.

All see the same text and end with the same active share; each is a structure like any other, so that one harness measures
all of them.

* ``static-magnitude``: the neurons and dimensions with the largest weights, the same for every token.
* ``static-activation``: the largest product of mean activation and weight (Wanda's criterion, for whole neurons).
* ``activation-split``: neurons that are often active are shared by all experts, the others are divided among experts by
  the tokens that use them, and a token goes to the expert whose centre is nearest (in the manner of CMoE).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.corpora.blocks import Blocks
from freemoe.families.sublayers import Sublayers
from freemoe.kernels.gates import route, top_k_mask
from freemoe.tomoe.structure import LayerStructure, Structure, dense_parameters, linear_parameters

METHODS = ("static-magnitude", "static-activation", "activation-split")
# Half of an expert's neurons are shared by all (CMoE's S3A3E8: 3 of 6 active ones).
_SHARED = 0.5


@dataclass(frozen=True, eq=False)
class Activity:
    """Mean absolute values of one layer over all tokens.

    Attributes:
        queries: (head_dim,), over query heads.
        keys: (head_dim,).
        values: (head_dim,).
        neurons: (experts, width), over the tokens of each cluster.
        tokens: (experts,), tokens of each cluster.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    neurons: Tensor
    tokens: Tensor


@torch.no_grad()
def activities(
    model: Any, sublayers: Sequence[Sublayers], blocks: Blocks, routers: Sequence[tuple[Tensor, Tensor]]
) -> list[Activity]:
    """One forward pass over ``blocks``."""
    device = next(model.parameters()).device
    found = []
    with ExitStack() as stack:
        for layer, (weight, bias) in zip(sublayers, routers, strict=True):
            h, experts = layer.rotary.head_dim, len(weight)
            sums = Activity(
                *(torch.zeros(h, device=device) for _ in range(3)),
                neurons=torch.zeros(experts, layer.width, device=device),
                tokens=torch.zeros(experts, device=device),
            )
            found.append(sums)
            _listen(stack, layer, sums, weight.to(device), bias.to(device))
        for batch in blocks.batches(4):
            model.base_model(batch.ids.to(device), position_ids=batch.positions.to(device), use_cache=False)
    return found


def _listen(stack: ExitStack, layer: Sublayers, sums: Activity, weight: Tensor, bias: Tensor) -> None:
    now: dict[str, Tensor] = {}

    def add(into: Tensor) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            into.add_(output.float().abs().unflatten(-1, (-1, len(into))).flatten(0, -2).sum(dim=0))

        return hook

    def on_mlp(module: Any, args: Any) -> None:
        now["expert"] = route(args[0].flatten(0, -2), weight, bias)

    def on_down(module: Any, args: Any) -> None:
        sums.neurons.index_add_(0, now["expert"], args[0].float().abs().flatten(0, -2))
        sums.tokens.add_(torch.bincount(now["expert"], minlength=len(weight)))

    stack.callback(layer.q.register_forward_hook(add(sums.queries)).remove)
    stack.callback(layer.k.register_forward_hook(add(sums.keys)).remove)
    stack.callback(layer.v.register_forward_hook(add(sums.values)).remove)
    stack.callback(layer.up[0].register_forward_pre_hook(on_mlp).remove)
    stack.callback(layer.down.register_forward_pre_hook(on_down).remove)


def rival(
    method: str,
    sublayers: Sequence[Sublayers],
    activity: Sequence[Activity],
    routers: Sequence[tuple[Tensor, Tensor]],
    share: float,
    attention: float,
) -> Structure:
    """Make one rival's structure.

    Args:
        method: One of ``METHODS``.
        sublayers: Of the base.
        activity: From ``activities``, with the same routers.
        routers: Clusters of tokens, from ``start.clusters``.
        share: Active share of the whole.
        attention: Share of every head's dimensions that stay; the MLP takes what is left.
    """
    neurons = _mlp_width(sublayers, share, attention)
    found = []
    for layer, own, (weight, bias), width in zip(sublayers, activity, routers, neurons, strict=True):
        magnitude = method == "static-magnitude"
        qk, vo = _attention_scores(layer, own, magnitude)
        bits = _bits(layer, qk, attention)
        kept = max(1, int(attention * layer.rotary.head_dim))
        if method == "activation-split":
            experts, router = _split(layer, own, width), (weight, bias)
        else:
            scores = _read(layer) * _written(layer) if magnitude else own.neurons.sum(dim=0) * _written(layer)
            experts = top_k_mask(scores, width).bool().expand(2, -1).clone()
            router = (torch.zeros(2, layer.hidden), torch.zeros(2))
        found.append(
            LayerStructure(
                bits.cpu(), top_k_mask(vo, kept).bool().cpu(), router[0].cpu(), router[1].cpu(), experts.cpu()
            )
        )
    return found


def _mlp_width(sublayers: Sequence[Sublayers], share: float, attention: float) -> list[int]:
    """Neurons that the budget leaves: the same share of every layer's MLP."""
    spent = mlp = 0
    for layer in sublayers:
        kept = max(1, int(attention * layer.rotary.head_dim))
        spent += linear_parameters(layer, kept, kept, 0)
        mlp += linear_parameters(layer, 0, 0, layer.width)
    left = (share * dense_parameters(sublayers) - spent) / mlp
    return [max(1, min(layer.width, int(left * layer.width + 1e-9))) for layer in sublayers]


def _attention_scores(layer: Sublayers, own: Activity, magnitude: bool) -> tuple[Tensor, Tensor]:
    """Scores of rotary bits and of value dimensions."""
    h = layer.rotary.head_dim

    def rows(linear: Any) -> Tensor:
        return linear.weight.detach().float().unflatten(0, (-1, h)).pow(2).sum(dim=(0, 2)).sqrt()

    columns = layer.o.weight.detach().float().unflatten(1, (-1, h)).pow(2).sum(dim=(0, 1)).sqrt()
    query = rows(layer.q) * rows(layer.k) if magnitude else own.queries * own.keys
    value = (rows(layer.v) if magnitude else own.values) * columns
    pairs = layer.rotary.turned // 2
    turned = query[: 2 * pairs].view(2, pairs).sum(dim=0)
    return torch.cat([turned, query[2 * pairs :]]), value


def _bits(layer: Sublayers, scores: Tensor, share: float) -> Tensor:
    """The best bits whose dimensions are at most the share of a head; at least one."""
    sizes = layer.rotary.sizes.to(scores.device)
    order = (scores / sizes).argsort(descending=True, stable=True)
    fits = sizes[order].cumsum(0) <= max(1, int(share * layer.rotary.head_dim))
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[order[fits]] = True
    kept[order[0]] = True
    return kept


def _read(layer: Sublayers) -> Tensor:
    """(width,): product of the lengths of the rows that make a neuron's activation."""
    lengths = [linear.weight.detach().float().norm(dim=1) for linear in layer.up]
    return torch.stack(lengths).prod(dim=0)


def _written(layer: Sublayers) -> Tensor:
    """(width,): length of the column that a neuron's activation is multiplied by."""
    return layer.down.weight.detach().float().norm(dim=0)


def _split(layer: Sublayers, own: Activity, width: int) -> Tensor:
    """(experts, width): shared neurons first, then each expert's own."""
    experts = len(own.tokens)
    sizes = _written(layer)
    overall = own.neurons.sum(dim=0) / own.tokens.sum() * sizes
    means = own.neurons / own.tokens.clamp(min=1)[:, None] * sizes
    shared = top_k_mask(overall, max(1, int(_SHARED * width))).bool()
    found = shared.expand(experts, -1).clone()
    missing = width - int(shared.sum())
    for mask, mean in zip(found, means, strict=True):
        if missing:
            mask[mean.masked_fill(shared, -torch.inf).topk(missing).indices] = True
    return found
