"""What can be had without gradients: free compensators, and the closed-form start of a parallel hook.

One pass of the reduced model over the text gives, for every mixture layer, the block's input x, its output y at the plan's
k and its output at full k for the same x. All fits are made of sums over tokens, in float64. Shapes: n tokens, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.evals.engine.output_head import forward_blocks
from freemoe.hookmoe.hooks.hook import HookSet
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.layers import MoELayer, moe_layers
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.models.hooks import combined_hooks, forward_hook, hooks_disabled
from freemoe.text.blocks import PackedBlocks
from freemoe.training.states import State, unpack_state


@torch.no_grad()
def sum_over_layers(
    model: Any,
    plan: LayerPlan,
    blocks: PackedBlocks,
    terms: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]],
    rescale: str = "none",
    checkpoint: UnitState = NO_CHECKPOINT,
) -> dict[int, list[Tensor]]:
    """Run the reduced model: of every layer that the plan cuts the sums over ``blocks`` of ``terms(x, y, y_full)``.

    x, y and y_full are (n, h). The sums are kept between two batches.
    """
    sums: dict[int, list[Tensor]] = {}
    full = {layer.number: layer.k for layer in moe_layers(model)}
    inside: list[int] = []

    def add_terms(layer: MoELayer, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if inside:
            return
        # The block once more at full k; a rescaled gate already runs at full k and is cut behind, so its hooks rest.
        k = layer.k
        inside.append(layer.number)
        layer.set_k(full[layer.number])
        try:
            with hooks_disabled(layer.gate, inputs=False):
                wanted = _first_output(block(*args))
        finally:
            layer.set_k(k)
            inside.pop()
        x = args[0].reshape(-1, layer.hidden)
        new = terms(x, _first_output(output).reshape(x.shape), wanted.reshape(x.shape))
        old = sums.get(layer.number)
        sums[layer.number] = list(new) if old is None else [a + b for a, b in zip(old, new, strict=True)]

    def to_state() -> State:
        return {f"{number}|{i}": t for number, own in sums.items() for i, t in enumerate(own)}

    def load_state(state: State) -> None:
        for number in sorted({int(name.partition("|")[0]) for name in state}):
            own = unpack_state(str(number), state)
            sums[number] = [own[str(i)].to(model.device) for i in range(len(own))]

    reduced = [layer for layer in moe_layers(model) if plan.ks[layer.number] != full[layer.number]]
    listening = combined_hooks(*(forward_hook(layer.block, partial(add_terms, layer)) for layer in reduced))
    with apply_plan(model, plan, rescale), listening:
        for batch in checkpoint.resume_iter(blocks.iter_batches(), to_state, load_state):
            forward_blocks(model, batch)
    return sums


def _first_output(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@dataclass
class ScaleBias:
    """The free compensator: every reduced block gives a y + b (a one number, b (h,), per layer)."""

    scales: dict[int, float]  # Layer to a
    biases: dict[int, Tensor]  # Layer to b (h,)

    def attached(self, model: Any) -> AbstractContextManager[None]:
        """While open, blocks are scaled and shifted."""
        layers = [layer for layer in moe_layers(model) if layer.number in self.scales]
        return combined_hooks(
            *(forward_hook(layer.block, partial(self._scale_and_shift, layer.number)) for layer in layers)
        )

    def _scale_and_shift(self, layer: int, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        first = _first_output(output)
        changed = (first * self.scales[layer] + self.biases[layer]).to(first.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed


def fit_scale_bias(
    model: Any, plan: LayerPlan, blocks: PackedBlocks, rescale: str = "none", checkpoint: UnitState = NO_CHECKPOINT
) -> ScaleBias:
    """Least squares of y_full on a y + b, per layer; the sums are kept between two batches."""

    def moments(x: Tensor, y: Tensor, wanted: Tensor) -> list[Tensor]:
        y, wanted = y.double(), wanted.double()
        count = torch.tensor(float(len(y)), dtype=torch.float64)
        return [count, y.sum(0), wanted.sum(0), (y * y).sum(), (y * wanted).sum()]

    sums = sum_over_layers(model, plan, blocks, moments, rescale, checkpoint)
    scales, biases = {}, {}
    for layer, (n, y, wanted, yy, yw) in sums.items():
        scale = float((yw - y @ wanted / n) / (yy - y @ y / n))
        scales[layer] = scale
        biases[layer] = ((wanted - scale * y) / n).float()
    return ScaleBias(scales, biases)


def linear_map(xx: Tensor, xr: Tensor, rank: int, ridge: float = 1e-3) -> tuple[Tensor, Tensor]:
    """The best map of one rank from x to a residual R, by ridge regression and the SVD of its fitted values.

    From ``xx`` and ``xr``, (h, h) sums of x x^T and x R^T, to A (rank, h) and B (h, rank) with R near B A x; ``ridge`` is
    the share of the mean eigenvalue of ``xx`` that is added to its diagonal.
    """
    size = xx.shape[0]
    weight = torch.linalg.solve(xx + ridge * xx.diagonal().mean() * torch.eye(size, dtype=xx.dtype), xr)
    # Fitted values are X W; their principal directions are the eigenvectors of W^T (X^T X) W.
    _, vectors = torch.linalg.eigh(weight.T @ xx @ weight)
    directions = vectors[:, -rank:].flip(1)
    return (weight @ directions).T, directions


@torch.no_grad()
def ridge_start(
    model: Any,
    plan: LayerPlan,
    hooks: HookSet,
    blocks: PackedBlocks,
    rescale: str = "none",
    checkpoint: UnitState = NO_CHECKPOINT,
) -> None:
    """Set parallel hooks to the best linear map of what their blocks lost; a ReLU pair carries one direction.

    A hook of width d starts as a map of rank d / 2, at most h, because ReLU(z) - ReLU(-z) = z needs two neurons.
    The sums are kept between two batches.
    """

    def products(x: Tensor, y: Tensor, wanted: Tensor) -> list[Tensor]:
        x, residual = x.double(), wanted.double() - y.double()
        return [x.T @ x, x.T @ residual]

    sums = sum_over_layers(model, plan, blocks, products, rescale, checkpoint)
    for number, hook in hooks.items():
        # A hook wider than 2 h has the whole map in its first neurons; the others begin at W2 = 0.
        rank = min(hook.width // 2, hook.up.in_features)
        if number not in sums or rank == 0:
            continue
        first, second = linear_map(*(t.cpu() for t in sums[number]), rank)
        # Both sides of the ReLU get the same share of the map's size, or one of them would learn much more slowly.
        balance = (second.norm() / first.norm()).sqrt()
        first, second = first * balance, second / balance / hook.r.detach().cpu().double()
        hook.up.weight[: 2 * rank].copy_(torch.cat([first, -first]))
        hook.down.weight[:, : 2 * rank].copy_(torch.cat([second, -second], dim=1))
