"""From trained logits to a structure, without noise unless the recipe asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from freemoe.kernels.gates import top_k_mask
from freemoe.models.sublayers import DecoderSublayers
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.gates.budget import LayerWidths
from freemoe.tomoe.gates.gating import GateSampler
from freemoe.tomoe.gates.hypernetwork import Hypernetwork, LayerLogits
from freemoe.tomoe.measure.scores import TOKENS
from freemoe.tomoe.recipe import GateSection
from freemoe.tomoe.structures.structure import LayerStructure, Structure, ValueGateTensors


def equalise_widths(experts: Tensor, logits: Tensor) -> Tensor:
    """Raise every expert to the largest width: first neurons that no expert has, then its own best (ToMoE App. E).

    Args:
        experts: (experts, width) bool.
        logits: (experts, width).

    Returns:
        (experts, width) bool; every row keeps what it had.
    """
    raised = experts.clone()
    most = int(experts.sum(dim=1).max())
    span = float(logits.max() - logits.min()) + 1
    for own, values in zip(raised, logits, strict=True):
        missing = most - int(own.sum())
        uncovered = ~raised.any(dim=0)
        order = values + span * uncovered.to(values)
        own[order.masked_fill(own, -torch.inf).topk(missing).indices] = True
    return raised


@torch.no_grad()
def structure_of(
    hypernetwork: Hypernetwork,
    gating: GateSampler,
    sublayers: Sequence[DecoderSublayers],
    widths: Sequence[LayerWidths] | None,
    model: Any,
    held_out: PackedBlocks,
    steps: int,
) -> Structure:
    """Read the structure that training ended with.

    Args:
        hypernetwork: Trained.
        gating: Its masks.
        sublayers: Of the base.
        widths: Of an exact budget; None where thresholds decide.
        model: The base, for K.
        held_out: Text on which thresholds' K is counted.
        steps: Of training; the noise of an export that has some is that of the next step.
    """
    recipe = gating.recipe
    logits = hypernetwork()
    made = gating.sample_masks(logits, widths, steps if recipe.export_noise else None)
    keep = (
        [w.vo for w in widths]
        if widths is not None
        else _count_value_dims(hypernetwork, gating, model, held_out, steps)
    )
    found = []
    for n, (layer, own) in enumerate(zip(sublayers, logits, strict=True)):
        gates: Any = hypernetwork.attention[n]
        router: Any = hypernetwork.mlp[n].router
        qk = made.qk[n].bool()
        if not bool(qk.any()):
            qk[own.qk.argmax()] = True
        experts = made.mlp[n].bool()
        # An expert of a threshold may have lost every neuron: its best one stays.
        experts |= top_k_mask(own.mlp, 1).bool()
        if recipe.equal_widths:
            experts = equalise_widths(experts, own.mlp)
        k = max(1, min(layer.rotary.head_dim, keep[n]))
        heads = made.heads[n]
        if heads is not None:
            heads = heads.bool().cpu()
            heads[own.heads.argmax()] = True  # pyright: ignore[reportOptionalMemberAccess]
        vo = (
            torch.ones(layer.rotary.head_dim, dtype=torch.bool)
            if heads is not None
            else _value_selector(gates, own, recipe, k)
        )
        found.append(
            LayerStructure(
                qk=qk.cpu(),
                vo=vo,
                router_weight=router.weight.detach().float().cpu().clone(),
                router_bias=router.bias.detach().float().cpu().clone(),
                experts=experts.cpu(),
                heads=heads,
            )
        )
    return found


def _value_selector(gates: Any, layer_logits: LayerLogits, recipe: GateSection, k: int) -> ValueGateTensors | Tensor:
    """What chooses the value dimensions of a layer: a gate of K per token, or the same K for all."""
    if recipe.value_masks == "static":
        nothing = gates.offset.new_zeros(1, gates.project.in_features)
        return top_k_mask(gates.values(nothing, layer_logits.value_embedding, False)[0], k).bool().cpu()
    project = gates.project.weight if recipe.local_embedding else torch.zeros_like(gates.project.weight)
    numbers = (
        project,
        layer_logits.value_embedding,
        gates.norm.weight,
        gates.norm.bias,
        gates.decode.weight[: gates.head_dim],
        gates.offset[: gates.head_dim],
    )
    return ValueGateTensors(*(t.detach().float().cpu().clone() for t in numbers), keep=torch.tensor(k))


def _count_value_dims(
    hypernetwork: Hypernetwork, gating: GateSampler, model: Any, held_out: PackedBlocks, steps: int
) -> list[int]:
    """K of every layer: kept value dimensions, mean or maximum over the tokens of held-out text (ToMoE App. E)."""
    counts: list[list[Tensor]] = [[] for _ in gating.sublayers]
    device = next(model.parameters()).device
    logits = hypernetwork()
    noisy = steps if gating.recipe.export_noise else None
    for batch in held_out.iter_batches(TOKENS):
        made = gating.sample_masks(logits, None, noisy)
        with gating.apply_masks(hypernetwork, logits, made, None, noisy):
            model.base_model(batch.ids.to(device), position_ids=batch.positions.to(device), use_cache=False)
        for own, seen in zip(counts, made.seen, strict=True):
            assert seen.value_counts is not None
            own.append(seen.value_counts)
    together = [torch.cat(own) for own in counts]
    return [int(c.max()) if gating.recipe.keep == "max" else round(float(c.mean())) for c in together]
