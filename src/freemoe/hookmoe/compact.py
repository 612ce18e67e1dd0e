"""Experts that really leave slots out: an implementation for transformers, named ``compact_mm``.

A slot whose index is not an expert's is dropped before any product is formed; what stays is sorted by expert and multiplied
expert by expert. transformers' own implementations either pay for such slots or need private flags to survive them. The
price is one wait for the device per layer, to learn how many slots there are: no CUDA graph, no full-graph compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

NAME = "compact_mm"


def compact_mm(self: Any, hidden: Tensor, index: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """Sum of the experts' outputs over the live slots.

    Args:
        self: The experts module.
        hidden: (n, h).
        index: (n, k) int64; ``num_experts`` marks a slot that is left out.
        weights: (n, k).

    Returns:
        (n, h).
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    index = index.reshape(len(hidden), -1)
    flat = index.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    sizes = torch.bincount(flat, minlength=self.num_experts)[: self.num_experts].tolist()
    live = order[: sum(sizes)]
    token = torch.div(live, index.shape[1], rounding_mode="floor")
    rows = hidden.index_select(0, token)
    outputs = []
    for expert, x in enumerate(rows.split(sizes)):
        if len(x):
            inner = self._apply_gate(_linear(self, x, "gate_up_proj", expert))
            outputs.append(_linear(self, inner, "down_proj", expert))
    result = torch.zeros_like(hidden)
    if outputs:
        weighted = torch.cat(outputs) * weights.reshape(-1)[live, None].to(hidden.dtype)
        result = result.index_add(0, token, weighted.to(hidden.dtype))
    return result


def _linear(experts: Any, x: Tensor, name: str, expert: int) -> Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(x, weight.t() if experts.is_transposed else weight, bias)


@contextmanager
def skipping(model: Any) -> Iterator[None]:
    """While open, the model's experts are run by ``compact_mm``; afterwards by what ran them before."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(NAME, compact_mm)
    before = model.config._experts_implementation
    model.set_experts_implementation(NAME)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
