"""From trained logits to a structure, without noise unless the recipe asks for it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from freemoe.evals.engine.output_head import forward_blocks
from freemoe.kernels.gates import top_k_mask
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.gates.budget import LayerWidths
from freemoe.tomoe.gates.gating import GateSampler, LayerMasks
from freemoe.tomoe.gates.hypernetwork import LayerLogits
from freemoe.tomoe.gates.train import GateTrainer
from freemoe.tomoe.recipe import GateSection
from freemoe.tomoe.structures.structure import (
    LayerStructure,
    Structure,
    ValueGateTensors,
    active_share,
)
from freemoe.training.straight_through import MEDIAN_NOISE

_MOVES = 4096
"""Thresholds that an export at a share chooses from: quantiles of all logits."""


def equalise_widths(experts: Tensor, logits: Tensor, widen: str = "uncovered") -> Tensor:
    """Raise every expert to the largest width (ToMoE App. E, which does not say by which neurons).

    By ``uncovered``: first neurons that no expert has, then its own best; ``own``: its own best, as the authors' code does.
    All are (experts, width); every row keeps what it had.
    """
    raised = experts.clone()
    most = int(experts.sum(dim=1).max())
    span = float(logits.max() - logits.min()) + 1 if widen == "uncovered" else 0.0
    for own, values in zip(raised, logits, strict=True):
        missing = most - int(own.sum())
        uncovered = ~raised.any(dim=0)
        order = values + span * uncovered.to(values)
        own[order.masked_fill(own, -torch.inf).topk(missing).indices] = True
    return raised


@torch.no_grad()
def structure_of(trainer: GateTrainer, held_out: PackedBlocks) -> Structure:
    """The structure of the gates as they are now.

    Held-out text says how many value dimensions a token keeps, where thresholds decide. The noise of an export that has some is
    that of the next step.
    """
    recipe, logits = trainer.recipe.gates, trainer.hypernetwork()
    step = trainer.step if recipe.export_noise else None
    widths = trainer.exact_widths(trainer.recipe.active)
    if widths is not None:
        return _read_structure(trainer, trainer.gating, logits, widths, step, [w.vo for w in widths])
    if recipe.export == "share":
        return _structure_at_share(trainer, logits, held_out)
    batches = _gates_on_text(trainer, logits, held_out, step)
    # Counts alone are kept: scores and routes of all the text would take as much memory as its activations.
    counts = [torch.cat(of_layer) for of_layer in zip(*([s.value_counts for s in b] for b in batches), strict=True)]
    keep = [int(c.max()) if recipe.keep == "max" else round(float(c.mean())) for c in counts]
    return _read_structure(trainer, trainer.gating, logits, None, step, keep)


def _structure_at_share(trainer: GateTrainer, logits: Sequence[LayerLogits], held_out: PackedBlocks) -> Structure:
    """The structure of one threshold for all logits, moved to where a token uses the asked share of the weights.

    K of a layer counts its scores above the moved threshold on text that is read once, with the thresholds unmoved: what a move
    does to the layers below is not in it.
    """
    sublayers, recipe, share = trainer.sublayers, trainer.recipe.gates, trainer.recipe.active
    scores = torch.cat([t.flatten() for own in logits for t in (own.qk, own.mlp)]).sort().values
    places = torch.linspace(0, len(scores) - 1, min(_MOVES, len(scores)), device=scores.device).long()
    thresholds = scores[places] + recipe.offset + MEDIAN_NOISE
    above, tokens = [torch.zeros(len(places), device=scores.device) for _ in sublayers], 0
    for batch in _gates_on_text(trainer, logits, held_out, None):
        for total, seen in zip(above, batch, strict=True):
            if seen.value_scores is None:  # whole heads are pruned, and each keeps all of its dimensions
                total += seen.value_counts.sum()
                continue
            ascending = seen.value_scores.flatten().sort().values
            total += len(ascending) - torch.searchsorted(ascending, thresholds, right=True)
        tokens += len(batch[0].value_counts)

    def read_above(number: int) -> Structure:
        gates = recipe.model_copy(update={"offset": recipe.offset - float(thresholds[number])})
        moved = trainer.recipe.model_copy(update={"gates": gates})
        keep = [round(float(total[number]) / tokens) for total in above]
        return _read_structure(trainer, replace(trainer.gating, recipe=moved), logits, None, None, keep)

    # The higher the threshold, the less is kept: the first one at or below the share is found by halving.
    first = bisect.bisect_left(
        range(len(places)), -share, key=lambda number: -active_share(read_above(number), sublayers)
    )
    near = [read_above(number) for number in (first - 1, first) if 0 <= number < len(places)]
    return min(near, key=lambda structure: abs(active_share(structure, sublayers) - share))


def _read_structure(
    trainer: GateTrainer,
    gating: GateSampler,
    logits: Sequence[LayerLogits],
    widths: Sequence[LayerWidths] | None,
    step: int | None,
    keep: Sequence[int],
) -> Structure:
    """The structure of logits, with K value dimensions (``keep``) in each layer; with the noise of a step, if that is given."""
    recipe, made, found = gating.recipe.gates, gating.sample_masks(logits, widths, step), []
    for n, (layer, own) in enumerate(zip(gating.sublayers, logits, strict=True)):
        gates: Any = trainer.hypernetwork.attention[n]
        router: Any = trainer.hypernetwork.mlp[n].router
        qk = made[n].qk.bool()
        if not bool(qk.any()):
            qk[own.qk.argmax()] = True
        experts = made[n].mlp.bool()
        # An expert of a threshold may have lost every neuron: its best one stays.
        experts |= top_k_mask(own.mlp, 1).bool()
        if recipe.equal_widths:
            experts = equalise_widths(experts, own.mlp, recipe.widen)
        k = max(1, min(layer.rotary.head_dim, keep[n]))
        heads = made[n].heads
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


def _gates_on_text(
    trainer: GateTrainer, logits: Sequence[LayerLogits], held_out: PackedBlocks, step: int | None
) -> Iterator[list[LayerMasks]]:
    """What every layer's gates do on held-out text, batch by batch."""
    model, gating = trainer.model, trainer.gating
    for batch in held_out.iter_batches():
        made = gating.sample_masks(logits, None, step)
        with gating.apply_masks(trainer.hypernetwork, made, step):
            forward_blocks(model, batch)
        yield made
