"""How much the loss minds that a weight changes: a smooth curvature from passes that run anyway (`docs/methods.md`).

A gradient says which way the loss goes, not how far. What switching w_ij off does beyond first order is w_ij^2 h_ij / 2
with the curvature h_ij. Single entries of it are noise, so it is taken from two vectors per matrix, as the diagonal of
K-FAC has it (Martens and Grosse 2015, arXiv:1503.05671): h_ij = E[x_j^2] E[(dL/dy_i)^2], x_j being the weight's input and
y_i its output. A weight that meets a massive activation (Sun et al. 2024, arXiv:2402.17762) has an enormous x_j, and
with it an enormous disturbance, however harmless or helpful its gradient makes it look.

Shapes: E fused experts (1 for a plain linear), R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.domain_experts.purify.batches import AnswerBatch, mean_loss
from freemoe.domain_experts.purify.gradients import Checkpointing, backward, gradients_to
from freemoe.domain_experts.rank.calibrate import InputNorms, calibrate
from freemoe.domain_experts.result import ForecastFacts
from freemoe.kernels.waits import numbers_of
from freemoe.models.mask import Mask
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix
from freemoe.training.states import State

# Weights of all matrices together that a quantile is taken from, evenly spaced.
_SAMPLE = 1 << 20
# The share of the weights whose disturbance counts as small.
_SMALL = 0.1
# Answer tokens of a forecast.
_FORECAST_TOKENS = 8192


@dataclass(frozen=True, eq=False)
class Curvature:
    """The factors of h, per token of the loss, for every weight by its name.

    Attributes:
        inputs: E[x_j^2] over tokens, ``(E, C)`` fp32.
        outputs: E[(dL/dy_i)^2] over tokens, in nats^2, ``(E, R)`` fp32.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def weight_curvature(self, weight: WeightMatrix) -> Tensor:
        """H of every single weight: ``(E, R, C)`` fp32, in nats per unit of weight squared."""
        return self.outputs[weight.name][:, :, None] * self.inputs[weight.name][:, None, :]

    def second_order_cost(self, weight: WeightMatrix) -> Tensor:
        """w^2 h / 2: what switching each weight off costs beyond first order, in nats; ``(E, R, C)`` fp32."""
        return weight.canonical_view().float().square().mul_(self.weight_curvature(weight)).div_(2)

    def fisher_scale(self, weight: WeightMatrix) -> Tensor:
        """|w| sqrt(h): how far each weight is from zero, in units of its own effect; ``(E, R, C)`` fp32."""
        scale = self.outputs[weight.name].sqrt()[:, :, None] * self.inputs[weight.name].sqrt()[:, None, :]
        return weight.canonical_view().float().abs().mul_(scale)

    def small_cost(self, weights: Sequence[WeightMatrix]) -> float:
        """The cost below which a tenth of the weights that cost anything lies: the unit in which switches move; 0 where none does."""
        return fisher_quantile(self, weights, _SMALL)


def fisher_quantile(curvature: Curvature, weights: Sequence[WeightMatrix], share: float) -> float:
    """The cost below which a share of the weights lies, from evenly spaced ones; 0 where none costs anything.

    Weights that cost nothing say nothing about the others: those of neurons that are off already, of experts that no token met.
    """
    stride = max(1, sum(w.size for w in weights) // _SAMPLE)
    drawn = torch.cat([curvature.fisher_scale(w).flatten()[::stride].clone().cpu() for w in weights])
    drawn = drawn[drawn > 0]
    return float(drawn.kthvalue(max(1, round(share * len(drawn)))).values) if len(drawn) else 0.0


def measure_curvature(
    model: Any,
    weights: Sequence[WeightMatrix],
    batches: Sequence[AnswerBatch],
    *,
    checkpointing: Checkpointing = False,
    checkpoint: UnitState = NO_CHECKPOINT,
) -> Curvature:
    """Measure h on documents: one forward pass and one gradient pass.

    The gradient of a mean loss over n tokens is a mean of n products x_j dL/dy_i, so where these have no common direction
    n E[g_ij^2] = E[x_j^2] E[(dL/dy_i)^2]. Averaged over a row, that gives the output's factor without a look at any output,
    which fused experts do not show. Where there is a common direction the factor is larger than the curvature: a base far
    from home is treated with more caution at first.

    Args:
        model: A causal LM; bit-equal afterwards.
        weights: Weights to measure.
        batches: Documents; a few thousand tokens suffice for vectors.
        checkpointing: As for ``gradients_to``.
        checkpoint: Where the pass keeps its sums between two batches.

    Raises:
        NumericError: When an input or a gradient is NaN or infinite.
    """
    inputs = _mean_squares(model, weights, batches, checkpoint.part_state("inputs"))
    outputs = {w.name: torch.zeros(w.num_experts, w.num_rows, device=w.device) for w in weights}
    answers = 0

    def add_gradient(weight: WeightMatrix, gradient: Tensor) -> None:
        seen = inputs[weight.name] > 0
        over = torch.where(seen, 1 / inputs[weight.name].clamp(min=torch.finfo(torch.float32).tiny), 0.0)
        squares = gradient.float().square()
        mean = (squares * over[:, None, :]).sum(-1) / seen.sum(-1, keepdim=True).clamp(min=1)
        outputs[weight.name] += mean * answers**2

    def load_state(state: State) -> None:
        for name, found in state.items():
            outputs[name].copy_(found)

    for batch in checkpoint.part_state("outputs").resume_iter(batches, lambda: outputs, load_state):
        answers = batch.answer_tokens
        # Left for every batch, so that no sum with NaN in it is kept.
        with gradients_to(model, weights, add_gradient, checkpointing=checkpointing):
            backward(model, [batch])
    total = max(1, sum(b.answer_tokens for b in batches))
    return Curvature(inputs, {name: found / total for name, found in outputs.items()})


def _mean_squares(
    model: Any, weights: Sequence[WeightMatrix], batches: Sequence[AnswerBatch], checkpoint: UnitState
) -> dict[str, Tensor]:
    """Mean squares of every weight's inputs over all tokens, also those that an expert was not given: ``(E, C)`` fp32."""
    norms: InputNorms | None = None

    def load_state(state: State) -> None:
        nonlocal norms
        norms = InputNorms.from_tensors(state)

    def to_state() -> State:
        return norms.to_tensors() if norms else {}

    for batch in checkpoint.resume_iter(batches, to_state, load_state):
        norms = calibrate(model, weights, [(batch.ids, batch.mask, batch.labels * 0)], 1, before=norms)
    assert norms is not None
    tokens = sum(int(b.mask.sum()) for b in batches)
    # Row 1 of the sums holds squares.
    return {w.name: (norms.sums[w.tap][0, 1] / tokens).to(w.device, torch.float32) for w in weights}


def forecast_loss(
    model: Any,
    weights: Sequence[WeightMatrix],
    mask: Mask,
    curvature: Curvature,
    batches: Sequence[AnswerBatch],
    *,
    checkpointing: Checkpointing = False,
) -> ForecastFacts | None:
    """Hold a linear and a quadratic picture of the loss against the loss itself; the model is bit-equal afterwards.

    Args:
        model: A causal LM.
        weights: Weights that may be switched off.
        mask: Those that are.
        curvature: Of the base.
        batches: Documents that gave no gradient to the choice; the first few thousand answer tokens of them are used.
        checkpointing: As for ``gradients_to``.

    Returns:
        None where no weight is off.
    """
    if not mask:
        return None
    used: list[AnswerBatch] = []
    for batch in batches:
        if sum(b.answer_tokens for b in used) < _FORECAST_TOKENS:
            used.append(batch)
    first: list[Tensor] = []

    def sum_products(weight: WeightMatrix, gradient: Tensor) -> None:
        off = mask[weight.name]
        own = off.gather_values(weight.canonical_view()).float()
        first.append((own * off.gather_values(gradient).float()).sum(dtype=torch.float64))

    chosen = [w for w in weights if w.name in mask]
    with gradients_to(model, chosen, sum_products, checkpointing=checkpointing):
        backward(model, used)
    lost = numbers_of([mask[w.name].gather_values(curvature.second_order_cost(w)).sum() for w in chosen])
    before = mean_loss(model, used)
    with switched_off(weights, mask):
        after = mean_loss(model, used)
    return ForecastFacts(first_order=sum(numbers_of(first)), disturbance=sum(lost), measured=before - after)


@dataclass(frozen=True)
class SuperWeight:
    """A single weight whose disturbance stands out.

    Attributes:
        weight: Name of its matrix.
        expert: Number of the expert; 0 for a plain linear.
        row: Its output.
        column: Its input.
        value: The weight.
        disturbance: w^2 h / 2 in nats.
        times: Its cost as a multiple of the median cost of all weights.
    """

    weight: str
    expert: int
    row: int
    column: int
    value: float
    disturbance: float
    times: float


def super_weights(curvature: Curvature, weights: Sequence[WeightMatrix], count: int = 10) -> list[SuperWeight]:
    """The weights with the largest disturbances (super weights, Yu et al. 2024, arXiv:2411.07191), largest first."""
    median = max(fisher_quantile(curvature, weights, 0.5), torch.finfo(torch.float32).tiny)
    found: list[tuple[float, int, int]] = []
    for number, weight in enumerate(weights):
        flat = curvature.second_order_cost(weight).flatten()
        top = torch.topk(flat, min(count, len(flat)))
        found += [(float(v), number, int(i)) for v, i in zip(top.values, top.indices, strict=True)]
    shown = []
    for value, number, place in sorted(found, key=lambda f: (-f[0], f[1:]))[:count]:
        weight = weights[number]
        expert, inside = divmod(place, weight.num_rows * weight.num_columns)
        row, column = divmod(inside, weight.num_columns)
        own = float(weight.canonical_view()[expert, row, column])
        shown.append(SuperWeight(weight.name, expert, row, column, own, value, (2 * value) ** 0.5 / median))
    return shown
