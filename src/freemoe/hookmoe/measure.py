"""What a plan costs and changes: loss and divergence on text, Act, parameters, routes (HookMoE Sec. 4.1); time is `evals.speed`'s.

Parameters are counted from the live model, so that shared heads, low-rank attention, dense layers and norms are right; the
paper's formula misses them. Act counts routed experts only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freemoe.core.errors import NumericError
from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.evals.engine.output_head import forward_blocks
from freemoe.evals.statistics import Interval
from freemoe.evals.text_score import TextScore, score_text
from freemoe.hookmoe.hooks.hook import HookSet
from freemoe.hookmoe.hooks.teacher import TeacherLogits, kl_from_teacher
from freemoe.hookmoe.plans.layers import moe_layers
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.models.hooks import combined_hooks, forward_pre_hook
from freemoe.text.blocks import PackedBlocks
from freemoe.training.states import State

_DRAWS = 2000  # Of a bootstrap


def measure_quality(
    model: Any, blocks: PackedBlocks, teacher: TeacherLogits, checkpoint: UnitState = NO_CHECKPOINT
) -> TextScore:
    """Score the model as it stands (plan and hooks on it) against the text and against what the teacher said.

    Raises:
        NumericError: A loss is NaN or infinite.
    """

    def divergence(rows: slice) -> Callable[[slice, Tensor], Tensor]:
        said = teacher[rows]
        flat = said[torch.ones_like(said.rest, dtype=torch.bool)]
        return lambda at, logits: kl_from_teacher(flat[at], logits)

    found = score_text(model, blocks, divergence, checkpoint=checkpoint)
    if not bool(torch.isfinite(found.ce).all()):
        raise NumericError("The loss on text is NaN or infinite: the base or its dtype is broken; try --dtype float32.")
    return found


def quality_as_json(score: TextScore) -> dict[str, float]:
    """The three means, as ``result.json`` has them."""
    return {"ce": score.mean_ce, "kl": score.mean_kl, "next_token_accuracy": score.accuracy}


def recovered_share(
    full: Tensor,  # (rows,) sums of a loss under the full model (zeros for KL)
    reduced: Tensor,  # (rows,) under the plan alone
    now: Tensor,  # (rows,) under the plan with hooks
    seed: int = 0,  # Of the bootstrap
    start: Tensor | None = None,  # (rows,) sums from which the gain counts; those of the plan alone if absent
    groups: Sequence[int] | None = None,  # Number of every row's group; each row is its own if absent
) -> Interval:
    """Share of what the reduced model lost that is won back: (start - now) / (reduced - full), groups drawn anew.

    With its 95 % interval; NaN where nothing was lost.
    """
    sums = (reduced - full, (reduced if start is None else start) - now)
    lost, won = (np.bincount(groups or range(len(full)), weights=part.numpy()) for part in sums)
    if lost.sum() <= 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    pick = rng.integers(0, len(lost), size=(_DRAWS, len(lost)))
    bottom = lost[pick].sum(1)
    # A draw in which nothing was lost has no share; it stands at the upper end, so that the interval stays honest.
    shares = np.where(bottom > 0, won[pick].sum(1) / np.where(bottom > 0, bottom, 1.0), np.inf)
    # Draws themselves, not values between two: between a number and infinity there is none.
    low = np.quantile(shares, 0.025, method="lower")
    high = np.quantile(shares, 0.975, method="higher")
    return Interval(float(won.sum() / lost.sum()), float(low), float(high))


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a mixture under a plan, as ``result.json`` has them."""

    total: int  # All of them, hooks included; tied ones count once
    active: int  # Those that one token uses: of the routed experts only as many as its plan runs
    hooks: int  # Those of the hooks


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
def record_routes(model: Any, blocks: PackedBlocks, checkpoint: UnitState = NO_CHECKPOINT) -> dict[int, Tensor]:
    """Layer -> (tokens, k) int64: the experts that ran, as they reach the experts, on the CPU; kept between two batches."""
    seen: dict[str, Tensor] = {}

    def record_layer(number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[str(number)] = args[1].reshape(-1, args[1].shape[-1]).cpu()

    def record_batch(batch: PackedBlocks) -> State:
        seen.clear()
        forward_blocks(model, batch)
        return dict(seen)

    with combined_hooks(*(forward_pre_hook(m.experts, partial(record_layer, m.number)) for m in moe_layers(model))):
        found = checkpoint.map_items(blocks.iter_batches(), record_batch)
    return {int(n): torch.cat([own[n] for own in found]) for n in sorted(found[0], key=int)}


def act_per_layer(routes: Mapping[int, Tensor], counts: Mapping[int, int]) -> dict[int, float]:
    """Executed pairs per token of every layer; an index beyond the last expert is a slot left out."""
    return {n: float((index < counts[n]).sum() / len(index)) for n, index in routes.items()}


def route_agreement(full: Mapping[int, Tensor], reduced: Mapping[int, Tensor]) -> dict[int, float]:
    """Share of the experts a layer runs now that the full model ran for the same token too."""
    return {n: float((reduced[n][:, :, None] == full[n][:, None, :]).any(-1).float().mean()) for n in reduced}


def load_cv(routes: Mapping[int, Tensor], counts: Mapping[int, int]) -> dict[int, float]:
    """Coefficient of variation of the tokens per expert: 0 is a perfect balance."""
    result = {}
    for n, index in routes.items():
        loads = torch.bincount(index.flatten(), minlength=counts[n])[: counts[n]].double()
        result[n] = float(loads.std(correction=0) / loads.mean())
    return result
