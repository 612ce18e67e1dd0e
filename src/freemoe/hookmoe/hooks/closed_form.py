"""What can be had without gradients: free compensators, and the closed-form start of a parallel hook.

One pass of the reduced model over the text gives, for every mixture layer, the block's input x, its output y at the plan's
k and its output at full k for the same x. All fits are made of sums over tokens, in float64. Shapes: n tokens, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.hookmoe.hooks.hook import HookSet
from freemoe.hookmoe.hooks.teacher import logits_of
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.layers import MoELayer, moe_layers
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.models.hooks import forward_hook, hooks_disabled
from freemoe.text.blocks import PackedBlocks
from freemoe.training.states import State, unpack_state

OnLayer = Callable[[int, Tensor, Tensor, Tensor], None]


@torch.no_grad()
def visit_reduced_layers(
    model: Any,
    plan: LayerPlan,
    blocks: PackedBlocks,
    on_layer: OnLayer,
    rescale: str = "none",
    sums: dict[int, list[Tensor]] | None = None,
    checkpoint: UnitState = NO_CHECKPOINT,
) -> None:
    """Run the reduced model and call ``on_layer(layer, x, y, y_full)``, each (n, h), for every layer the plan cuts.

    What ``on_layer`` sums up, by layer, is kept between two batches.
    """
    sums = {} if sums is None else sums
    full = {layer.number: layer.k for layer in moe_layers(model)}
    inside: list[int] = []

    def make_block_hook(layer: MoELayer) -> Callable[..., None]:
        def record_outputs(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
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
            on_layer(layer.number, x, _first_output(output).reshape(x.shape), wanted.reshape(x.shape))

        return record_outputs

    with apply_plan(model, plan, rescale), ExitStack() as stack:
        for layer in moe_layers(model):
            if plan.ks[layer.number] != full[layer.number]:
                stack.enter_context(forward_hook(layer.block, make_block_hook(layer)))

        def to_state() -> State:
            return {f"{number}|{i}": t for number, own in sums.items() for i, t in enumerate(own)}

        def load_state(state: State) -> None:
            device = model.device
            for number in sorted({int(name.partition("|")[0]) for name in state}):
                own = unpack_state(str(number), state)
                sums[number] = [own[str(i)].to(device) for i in range(len(own))]

        for batch in checkpoint.resume_iter(blocks.iter_batches(), to_state, load_state):
            logits_of(model, batch)


def _first_output(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@dataclass
class ScaleBias:
    """The free compensator: every reduced block gives a y + b (a one number, b (h,), per layer)."""

    scales: dict[int, float]  # Layer to a
    biases: dict[int, Tensor]  # Layer to b (h,)

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """While open, blocks are scaled and shifted."""
        with ExitStack() as stack:
            for layer in moe_layers(model):
                if layer.number in self.scales:
                    hook = _make_scale_hook(self.scales[layer.number], self.biases[layer.number])
                    stack.enter_context(forward_hook(layer.block, hook))
            yield


def _make_scale_hook(scale: float, bias: Tensor) -> Callable[..., Any]:
    def scale_and_shift(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        changed = (_first_output(output) * scale + bias).to(_first_output(output).dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return scale_and_shift


def fit_scale_bias(
    model: Any, plan: LayerPlan, blocks: PackedBlocks, rescale: str = "none", checkpoint: UnitState = NO_CHECKPOINT
) -> ScaleBias:
    """Least squares of y_full on a y + b, per layer; the sums are kept between two batches."""
    sums: dict[int, list[Tensor]] = {}

    def add_moments(layer: int, x: Tensor, y: Tensor, wanted: Tensor) -> None:
        y, wanted = y.double(), wanted.double()
        new = [
            torch.tensor(float(len(y)), dtype=torch.float64),
            y.sum(0),
            wanted.sum(0),
            (y * y).sum(),
            (y * wanted).sum(),
        ]
        sums[layer] = [a + b for a, b in zip(sums[layer], new, strict=True)] if layer in sums else new

    visit_reduced_layers(model, plan, blocks, add_moments, rescale, sums, checkpoint)
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
    sums: dict[int, list[Tensor]] = {}

    def add_products(layer: int, x: Tensor, y: Tensor, wanted: Tensor) -> None:
        x, residual = x.double(), wanted.double() - y.double()
        xx, xr = x.T @ x, x.T @ residual
        sums[layer] = [sums[layer][0] + xx, sums[layer][1] + xr] if layer in sums else [xx, xr]

    visit_reduced_layers(model, plan, blocks, add_products, rescale, sums, checkpoint)
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
