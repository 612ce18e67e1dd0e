"""SparseGPT: switch weights off and let the others of their row make up for it (Frantar & Alistarh 2023).

With H = X^T X / n over the inputs of a linear, the error that a row w makes is (w - w')^T H (w - w'). Columns are settled
from left to right. With F the columns from j on, setting w_j to q costs (w_j - q)^2 / [H_F^-1]_jj, and the best the
columns behind j can do about it is to fall by (w_j - q) / [H_F^-1]_jj times row j of H_F^-1. All those inverses stand in
one upper Cholesky factor U of H^-1 = U^T U: row j of H_F^-1 is U_jj times row j of U.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rivals.fits.tuned import VALUE_BYTES
from benchmarks.rivals.rival import Fitted, Materials, Terms, restored
from freemoe.core.errors import NumericError
from freemoe.domain_experts.purify.batches import AnswerBatch
from freemoe.models.hooks import combined_hooks, forward_pre_hook
from freemoe.models.spec import family_of, find_layers
from freemoe.models.taps import tap_inputs
from freemoe.models.weights import WeightMatrix

BLOCK, DAMPING = 128, 0.01
"""The paper's: columns whose mask is chosen at once, and what is added to H as a share of its mean diagonal."""


def prune(weight: Tensor, hessian: Tensor, share: float, block: int = BLOCK, damping: float = DAMPING) -> Tensor:
    """Prune one matrix, (rows, columns), by a share of every block of columns; exact zeros where off, in the weight's dtype.

    ``hessian``: (columns, columns), mean of x x^T over inputs; not changed.

    Raises:
        NumericError: The damped Hessian is not positive definite.
    """
    left, upper = weight.detach().float().clone(), _factor(hessian, damping)
    # What no input ever reaches is free.
    left[:, hessian.diagonal() == 0] = 0
    for start in range(0, left.shape[1], block):
        end = min(start + block, left.shape[1])
        diagonal = upper.diagonal()[start:end]
        cost = (left[:, start:end] / diagonal) ** 2
        off = torch.zeros(cost.numel(), dtype=torch.bool, device=cost.device)
        off[cost.flatten().argsort(stable=True)[: math.floor(share * cost.numel() + 0.5)]] = True
        off = off.view_as(cost)
        errors = torch.zeros_like(cost)
        for j in range(start, end):
            kept = left[:, j].masked_fill(off[:, j - start], 0)
            errors[:, j - start] = (left[:, j] - kept) / upper[j, j]
            left[:, j] = kept
            left[:, j + 1 : end] -= errors[:, j - start, None] * upper[j, j + 1 : end]
        left[:, end:] -= errors @ upper[start:end, end:]
    return left.to(weight.dtype)


def _factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the damped inverse."""
    damped = hessian.float().clone()
    dead = damped.diagonal() == 0
    damped.diagonal()[dead] = 1
    damped.diagonal().add_(damping * damped.diagonal().mean())
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError as error:
        raise NumericError(
            f"The Hessian of {len(hessian)} inputs is not positive definite with damping {damping}. Raise the damping, or "
            "calibrate on more text."
        ) from error


@contextmanager
def pruned(model: Any, materials: Materials, terms: Terms) -> Iterator[Fitted]:
    """Prune layer by layer, every layer on what the pruned ones before it give."""
    weights = materials.weights
    with restored(model, weights):
        with torch.no_grad():
            _prune_layers(model, weights, materials.batches(materials.gradient), terms.share)
        kept = sum(int((w.canonical_view() != 0).sum()) for w in weights)
        size = materials.size
        # A bit per place says which are there; the values that are there have changed.
        yield Fitted(numbers=kept, bytes=VALUE_BYTES * kept + size // 8, share_off=1 - kept / size)


def _prune_layers(model: Any, weights: Sequence[WeightMatrix], batches: Sequence[AnswerBatch], share: float) -> None:
    _, layers = find_layers(model, family_of(model))
    calls = _calls(model, layers, batches)
    states = [given[0][0][0] for given in calls]
    # Of a layer, by tap and expert: the sum of x x^T, (columns, columns), and how many inputs there were.
    sums: dict[tuple[str, int], Tensor] = {}
    counts: Counter[tuple[str, int]] = Counter()
    real: Tensor = torch.empty(0)

    def add(tap: str, expert: int, x: Tensor, token: Tensor) -> None:
        x, key = x[real[token]].float(), (tap, expert)
        sums[key] = sums[key] + x.T @ x if key in sums else x.T @ x
        counts[key] += len(x)

    for number, layer in enumerate(layers):
        own = [w for w in weights if w.layer == number]
        sums.clear()
        counts.clear()
        for i, batch in enumerate(batches):
            # Padding is left out.
            real = batch.mask.flatten().bool()
            with tap_inputs(model, own, add):
                _run(layer, states[i], calls[i][number])
        for weight in own:
            view = weight.canonical_view()
            for expert in range(weight.num_experts):
                key, columns = (weight.tap, expert), weight.num_columns
                # Zeros where an expert was never asked.
                hessian = sums[key] / counts[key] if key in sums else torch.zeros(columns, columns)
                view[expert].copy_(prune(view[expert], hessian.to(view.device), share))
        states = [_run(layer, state, given[number]) for state, given in zip(states, calls, strict=True)]


def _calls(model: Any, layers: Sequence[nn.Module], batches: Sequence[AnswerBatch]) -> list[list[tuple[Any, Any]]]:
    """Per batch and layer the arguments that the model gives a layer; positions and masks do not depend on weights."""
    found: list[list[tuple[Any, Any]]] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not args:
            args, kwargs = (kwargs["hidden_states"],), {k: v for k, v in kwargs.items() if k != "hidden_states"}
        # The first layer's state alone is needed.
        found[-1].append((args if not found[-1] else (None, *args[1:]), kwargs))

    with combined_hooks(*(forward_pre_hook(layer, keep, kwargs=True) for layer in layers)):
        for batch in batches:
            found.append([])
            model.base_model(input_ids=batch.ids, use_cache=False)
    return found


def _run(layer: nn.Module, state: Tensor, given: tuple[Any, Any]) -> Tensor:
    args, kwargs = given
    output = layer(state, *args[1:], **kwargs)
    return output[0] if isinstance(output, tuple) else output
