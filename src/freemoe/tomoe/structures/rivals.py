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
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freemoe.core.registry import Registry
from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.evals.engine.output_head import forward_blocks
from freemoe.kernels.gates import route_tokens, top_k_mask
from freemoe.models.hooks import combined_hooks, forward_hook, forward_pre_hook
from freemoe.models.sublayers import DecoderSublayers
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.recipe import METHODS
from freemoe.tomoe.structures.structure import LayerStructure, Structure, dense_parameters, linear_parameters
from freemoe.training.states import State, pack_state, unpack_state

# Half of an expert's neurons are shared by all (CMoE's S3A3E8: 3 of 6 active ones).
_SHARED = 0.5


@dataclass(frozen=True, eq=False)
class LayerActivity:
    """Mean absolute values of one layer over all tokens."""

    queries: Tensor  # (head_dim,), over query heads
    keys: Tensor  # (head_dim,)
    values: Tensor  # (head_dim,)
    neurons: Tensor  # (experts, width), over the tokens of each cluster
    tokens: Tensor  # (experts,), tokens of each cluster


@torch.no_grad()
def measure_activity(
    model: Any,
    sublayers: Sequence[DecoderSublayers],
    blocks: PackedBlocks,
    routers: Sequence[tuple[Tensor, Tensor]],
    checkpoint: UnitState = NO_CHECKPOINT,
) -> list[LayerActivity]:
    """One forward pass over ``blocks``, which keeps its sums between two batches."""
    device = next(model.parameters()).device
    found = []
    with ExitStack() as stack:
        for layer, (weight, bias) in zip(sublayers, routers, strict=True):
            h, experts = layer.rotary.head_dim, len(weight)
            sums = LayerActivity(
                *(torch.zeros(h, device=device) for _ in range(3)),
                neurons=torch.zeros(experts, layer.intermediate_size, device=device),
                tokens=torch.zeros(experts, device=device),
            )
            found.append(sums)
            stack.enter_context(_collect_activity(layer, sums, weight.to(device), bias.to(device)))

        def load_state(state: State) -> None:
            for n, own in enumerate(found):
                for name, t in unpack_state(str(n), state).items():
                    getattr(own, name).copy_(t)

        def to_state() -> State:
            return {key: t for n, own in enumerate(found) for key, t in pack_state(str(n), vars(own)).items()}

        for batch in checkpoint.resume_iter(blocks.iter_batches(), to_state, load_state):
            forward_blocks(model, batch)
    return found


def _collect_activity(
    layer: DecoderSublayers, sums: LayerActivity, weight: Tensor, bias: Tensor
) -> AbstractContextManager[None]:
    now: dict[str, Tensor] = {}

    def add_absolute_values(into: Tensor, module: Any, args: Any, output: Tensor) -> None:
        into.add_(output.float().abs().unflatten(-1, (-1, len(into))).flatten(0, -2).sum(dim=0))

    def on_mlp(module: Any, args: Any) -> None:
        now["expert"] = route_tokens(args[0].flatten(0, -2), weight, bias)

    def on_down(module: Any, args: Any) -> None:
        sums.neurons.index_add_(0, now["expert"], args[0].float().abs().flatten(0, -2))
        sums.tokens.add_(torch.bincount(now["expert"], minlength=len(weight)))

    return combined_hooks(
        forward_hook(layer.q, partial(add_absolute_values, sums.queries)),
        forward_hook(layer.k, partial(add_absolute_values, sums.keys)),
        forward_hook(layer.v, partial(add_absolute_values, sums.values)),
        forward_pre_hook(layer.up[0], on_mlp),
        forward_pre_hook(layer.down, on_down),
    )


@dataclass(frozen=True, eq=False)
class BaselineInputs:
    """What a rival may look at to make one layer's structure."""

    layer: DecoderSublayers  # The layer
    activity: LayerActivity  # Mean absolute values
    router: tuple[Tensor, Tensor]  # Weight and bias of the clusters of tokens
    width: int  # Neurons of a token
    attention: float  # Share of every head's dimensions that stay


Rival = Callable[[BaselineInputs], LayerStructure]

RIVALS: Registry[Rival] = Registry("rival of a conversion", METHODS)


def make_baseline(
    method: str,
    sublayers: Sequence[DecoderSublayers],
    activity: Sequence[LayerActivity],
    routers: Sequence[tuple[Tensor, Tensor]],
    share: float,
    attention: float,
) -> Structure:
    """Make one rival's structure.

    ``share`` is of the whole, ``attention`` the share of every head's dimensions that stay: the MLP takes what is left.
    Activity and routers are of the same clusters of tokens.
    """
    make, widths = RIVALS.get(method), _mlp_width(sublayers, share, attention)
    layers = zip(sublayers, activity, routers, widths, strict=True)
    return [make(BaselineInputs(layer, own, router, width, attention)) for layer, own, router, width in layers]


def by_magnitude(seen: BaselineInputs) -> LayerStructure:
    """The neurons and dimensions with the largest weights, the same for every token."""
    # Lengths of the rows that make a neuron's activation, and of the column that it is multiplied by.
    inputs = torch.stack([linear.weight.detach().float().norm(dim=1) for linear in seen.layer.up]).prod(dim=0)
    return _static_structure(seen, inputs * _output_norms(seen.layer), magnitude=True)


def by_activation(seen: BaselineInputs) -> LayerStructure:
    """The largest products of mean activation and weight, the same for every token."""
    return _static_structure(seen, seen.activity.neurons.sum(dim=0) * _output_norms(seen.layer), magnitude=False)


def by_cluster(seen: BaselineInputs) -> LayerStructure:
    """Often active neurons shared by all experts, the others divided by the tokens that use them."""
    return _make_layer_structure(
        seen, seen.router, _split_neurons(seen.layer, seen.activity, seen.width), magnitude=False
    )


def _static_structure(seen: BaselineInputs, scores: Tensor, magnitude: bool) -> LayerStructure:
    experts = top_k_mask(scores, seen.width).bool().expand(2, -1).clone()
    hidden = seen.layer.hidden_size
    return _make_layer_structure(seen, (torch.zeros(2, hidden), torch.zeros(2)), experts, magnitude)


def _make_layer_structure(
    seen: BaselineInputs, router: tuple[Tensor, Tensor], experts: Tensor, magnitude: bool
) -> LayerStructure:
    qk, vo = _attention_scores(seen.layer, seen.activity, magnitude)
    kept = max(1, int(seen.attention * seen.layer.rotary.head_dim))
    # The best bits whose dimensions are at most the share of a head; at least one.
    sizes = seen.layer.rotary.bit_sizes.to(qk.device)
    order = (qk / sizes).argsort(descending=True, stable=True)
    bits = torch.zeros_like(qk, dtype=torch.bool)
    bits[order[sizes[order].cumsum(0) <= kept]] = True
    bits[order[0]] = True
    values = top_k_mask(vo, kept).bool()
    return LayerStructure(bits.cpu(), values.cpu(), router[0].cpu(), router[1].cpu(), experts.cpu())


RIVALS.add("static-magnitude", by_magnitude, "the largest weights, for all tokens alike")
RIVALS.add(
    "static-activation", by_activation, "mean activation x weight (Wanda for whole neurons), for all tokens alike"
)
RIVALS.add("activation-split", by_cluster, "shared neurons, and others by cluster of tokens (in the manner of CMoE)")


def _mlp_width(sublayers: Sequence[DecoderSublayers], share: float, attention: float) -> list[int]:
    """Neurons that the budget leaves: the same share of every layer's MLP."""
    spent = mlp = 0
    for layer in sublayers:
        kept = max(1, int(attention * layer.rotary.head_dim))
        spent += linear_parameters(layer, kept, kept, 0)
        mlp += linear_parameters(layer, 0, 0, layer.intermediate_size)
    left = (share * dense_parameters(sublayers) - spent) / mlp
    return [max(1, min(layer.intermediate_size, int(left * layer.intermediate_size + 1e-9))) for layer in sublayers]


def _attention_scores(layer: DecoderSublayers, activity: LayerActivity, magnitude: bool) -> tuple[Tensor, Tensor]:
    """Scores of rotary bits and of value dimensions."""
    h = layer.rotary.head_dim

    def row_norms(linear: Any) -> Tensor:
        return linear.weight.detach().float().unflatten(0, (-1, h)).pow(2).sum(dim=(0, 2)).sqrt()

    columns = layer.o.weight.detach().float().unflatten(1, (-1, h)).pow(2).sum(dim=(0, 1)).sqrt()
    query = row_norms(layer.q) * row_norms(layer.k) if magnitude else activity.queries * activity.keys
    value = (row_norms(layer.v) if magnitude else activity.values) * columns
    pairs = layer.rotary.turned // 2
    turned = query[: 2 * pairs].view(2, pairs).sum(dim=0)
    return torch.cat([turned, query[2 * pairs :]]), value


def _output_norms(layer: DecoderSublayers) -> Tensor:
    """(width,): length of the column that a neuron's activation is multiplied by."""
    return layer.down.weight.detach().float().norm(dim=0)


def _split_neurons(layer: DecoderSublayers, activity: LayerActivity, width: int) -> Tensor:
    """(experts, width): shared neurons first, then each expert's own."""
    experts = len(activity.tokens)
    sizes = _output_norms(layer)
    overall = activity.neurons.sum(dim=0) / activity.tokens.sum() * sizes
    means = activity.neurons / activity.tokens.clamp(min=1)[:, None] * sizes
    shared = top_k_mask(overall, max(1, int(_SHARED * width))).bool()
    found = shared.expand(experts, -1).clone()
    missing = width - int(shared.sum())
    for mask, mean in zip(found, means, strict=True):
        if missing:
            mask[mean.masked_fill(shared, -torch.inf).topk(missing).indices] = True
    return found
