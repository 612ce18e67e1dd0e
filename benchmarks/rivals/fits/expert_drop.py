"""Which experts of a mixture go: by what their absence changes (NAEE), or by gate times output (REAP).

NAEE: Lu et al. 2024. REAP: Lasby et al. 2025. Both look at each layer by itself, on the inputs that the whole model gives
it, and rank nothing across layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.domain_experts.purify.batches import AnswerBatch
from freemoe.domain_experts.structured.units import ModelUnits
from freemoe.hookmoe.plans.layers import MoELayer, moe_layers
from freemoe.models.gates import restrict_router
from freemoe.models.hooks import combined_hooks, forward_hook, forward_pre_hook
from freemoe.models.taps import tap_inputs
from freemoe.models.weights import WeightMatrix

MOST_SUBSETS = 512
"""Above this NAEE drops one expert after the other instead of trying every set, as its authors do for many experts."""
TOKENS = 4096
"""Inputs of a layer that NAEE looks at, at most."""


@torch.no_grad()
def naee_scores(model: Any, units: ModelUnits, batches: Sequence[AnswerBatch], counts: Sequence[int]) -> list[Tensor]:
    """Per layer (experts,): 0 for those that go, 1 for those that stay.

    What goes is the set of ``counts`` experts without which the block's output changes least (Frobenius norm), the router
    choosing among the others by its own rule.
    """
    blocks = {layer.number: layer for layer in moe_layers(model)}
    inputs = _inputs(model, [blocks[layer.number] for layer in units.layers], batches)
    found = []
    for layer, count in zip(units.layers, counts, strict=True):
        scores = torch.ones(layer.count)
        scores[list(fewest_changes(blocks[layer.number], inputs[layer.number], count))] = 0
        found.append(scores)
    return found


def fewest_changes(layer: MoELayer, x: Tensor, count: int) -> tuple[int, ...]:
    """The ``count`` experts of a block whose absence changes its output for x, (tokens, hidden), least."""
    whole = _output(layer, x)

    def change(gone: tuple[int, ...]) -> float:
        mask = torch.ones(layer.count)
        mask[list(gone)] = 0
        with restrict_router(layer.gate, mask):
            return float((_output(layer, x) - whole).double().square().sum())

    if not count:
        return ()
    if math.comb(layer.count, count) <= MOST_SUBSETS:
        return min(itertools.combinations(range(layer.count), count), key=change)
    gone: tuple[int, ...] = ()
    for _ in range(count):
        more = [(*gone, e) for e in range(layer.count) if e not in gone]
        gone = min(more, key=change)
    return tuple(sorted(gone))


def _output(layer: MoELayer, x: Tensor) -> Tensor:
    output = layer.block(x[None])
    return (output[0] if isinstance(output, tuple) else output).float()


def _inputs(model: Any, layers: Sequence[MoELayer], batches: Sequence[AnswerBatch]) -> dict[int, Tensor]:
    """Inputs (tokens, hidden) of every block, evenly spaced over all batches; padding left out."""
    parts: dict[int, list[Tensor]] = {layer.number: [] for layer in layers}
    total = sum(int(b.mask.sum()) for b in batches)
    stride = max(1, -(-total // TOKENS))
    real: Tensor = torch.empty(0)

    def keep(number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        parts[number].append(x.detach().reshape(-1, x.shape[-1])[real][::stride])

    hooks = (forward_pre_hook(layer.block, partial(keep, layer.number), kwargs=True) for layer in layers)
    with combined_hooks(*hooks):
        for batch in batches:
            real = batch.mask.flatten().bool()
            model.base_model(input_ids=batch.ids, use_cache=False)
    return {number: torch.cat(found) for number, found in parts.items()}


@torch.no_grad()
def reap_scores(
    model: Any, weights: Sequence[WeightMatrix], units: ModelUnits, batches: Sequence[AnswerBatch]
) -> list[Tensor]:
    """Per layer (experts,): mean over an expert's tokens of its gate's weight times the norm of its output.

    An expert that no token was given scores 0.
    """
    # The last fused weight of a layer: what the experts' inner activation is multiplied by.
    downs = {w.tap: w for w in {w.layer: w for w in weights if w.is_fused}.values()}
    sums = {w.layer: torch.zeros(2, w.num_experts, dtype=torch.float64) for w in downs.values()}
    routed: dict[int, tuple[Tensor, Tensor]] = {}
    real: Tensor = torch.empty(0)

    def listen(number: int, module: nn.Module, args: Any, output: Any) -> None:
        _, shares, index = output
        routed[number] = shares.reshape(-1, shares.shape[-1]), index.reshape(-1, index.shape[-1])

    def on_input(tap: str, expert: int, x: Tensor, token: Tensor) -> None:
        if tap not in downs:
            return
        weight = downs[tap]
        shares, index = routed[weight.layer]
        given = torch.where(index[token] == expert, shares[token].float(), 0.0).sum(dim=1)
        norms = (x.float() @ weight.canonical_view()[expert].float().T).norm(dim=1)
        seen = real[token]
        sums[weight.layer][0, expert] += float((given * norms)[seen].double().sum())
        sums[weight.layer][1, expert] += int(seen.sum())

    hooks = (forward_hook(layer.module, partial(listen, layer.number)) for layer in units.layers)
    with combined_hooks(*hooks), tap_inputs(model, list(downs.values()), on_input):
        for batch in batches:
            real = batch.mask.flatten().bool()
            model.base_model(input_ids=batch.ids, use_cache=False)
    means = (sums[layer.number] for layer in units.layers)
    return [(total / count.clamp(min=1)).float() for total, count in means]
