"""What a plan costs and changes: Act, parameters, routes (HookMoE Sec. 4.1); time is `evals.speed`'s.

Parameters are counted from the live model, so that shared heads, low-rank attention, dense layers and norms are right; the
paper's formula misses them. Act counts routed experts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.run.unit_state import NOT_KEPT, UnitState
from freemoe.hookmoe.hooks.hook import HookSet
from freemoe.hookmoe.hooks.teacher import logits_of
from freemoe.hookmoe.plans.layers import moe_layers
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.models.hooks import forward_pre_hook
from freemoe.text.blocks import PackedBlocks
from freemoe.training.states import State


@dataclass(frozen=True)
class ParameterCounts:
    """Counted parameters.

    Attributes:
        total: All of them, hooks included; tied ones count once.
        active: Those that one token uses: of the routed experts only as many as its plan runs.
        hooks: Those of the hooks.
    """

    total: int
    active: int
    hooks: int

    def as_json(self) -> dict[str, int]:
        """As JSON."""
        return {"total": self.total, "active": self.active, "hooks": self.hooks}


def count_parameters(model: Any, plan: LayerPlan, hooks: HookSet | None = None) -> ParameterCounts:
    """Count from the model as it is; works on the meta device too."""
    own = hooks.num_parameters if hooks is not None else 0
    total = sum(p.numel() for p in model.parameters()) + own
    idle = 0
    for layer in moe_layers(model):
        experts = sum(p.numel() for p in layer.experts.parameters())
        k = plan.ks[layer.number] or 0
        idle += experts - experts * k // layer.count
    return ParameterCounts(total, total - idle, own)


def act_equivalent(model: Any, hooks: HookSet) -> float:
    """The hooks' weights as routed experts per mixture layer, to be added to Act when both are compared by work."""
    layers = moe_layers(model)
    expert = sum(p.numel() for p in layers[0].experts.parameters()) / layers[0].count
    return hooks.num_parameters / expert / len(layers)


@torch.no_grad()
def record_routes(model: Any, blocks: PackedBlocks, kept: UnitState = NOT_KEPT) -> dict[int, Tensor]:
    """Layer -> (tokens, k) int64: the experts that ran, as they reach the experts, on the CPU; kept between two batches."""
    seen: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for layer in moe_layers(model):

            def record_layer(module: nn.Module, args: tuple[Any, ...], number: int = layer.number) -> None:
                seen[str(number)] = args[1].reshape(-1, args[1].shape[-1]).cpu()

            stack.enter_context(forward_pre_hook(layer.experts, record_layer))

        def record_batch(batch: PackedBlocks) -> State:
            seen.clear()
            logits_of(model, batch)
            return dict(seen)

        found = kept.map_items(blocks.iter_batches(), record_batch)
    return {int(n): torch.cat([own[n] for own in found]) for n in sorted(found[0], key=int)}


def act_per_layer(found: Mapping[int, Tensor], counts: Mapping[int, int]) -> dict[int, float]:
    """Executed pairs per token of every layer; an index beyond the last expert is a slot left out."""
    return {n: float((index < counts[n]).sum() / len(index)) for n, index in found.items()}


def route_agreement(full: Mapping[int, Tensor], reduced: Mapping[int, Tensor]) -> dict[int, float]:
    """Share of the experts a layer runs now that the full model ran for the same token too."""
    return {n: float((reduced[n][:, :, None] == full[n][:, None, :]).any(-1).float().mean()) for n in reduced}


def load_cv(found: Mapping[int, Tensor], counts: Mapping[int, int]) -> dict[int, float]:
    """Coefficient of variation of the tokens per expert: 0 is a perfect balance."""
    result = {}
    for n, index in found.items():
        loads = torch.bincount(index.flatten(), minlength=counts[n])[: counts[n]].double()
        result[n] = float(loads.std(correction=0) / loads.mean())
    return result
