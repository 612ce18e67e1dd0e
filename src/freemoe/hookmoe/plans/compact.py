"""Experts that really leave slots out: an implementation for transformers, named ``compact_mm``.

A slot whose index is not an expert's is dropped before any product is formed; what stays is sorted by expert and multiplied
expert by expert. transformers' own implementations either pay for such slots or need private flags to survive them. The
price is one wait for the device per layer, to learn how many slots there are: no CUDA graph, no full-graph compilation.

Products are formed as W x^T, with the weight first: where an expert has few tokens, the CPU's matrix library spends much of
its time on the weight, and is quicker this way round.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from freemoe.compat.transformers import experts_run_by, gate_of

NAME = "compact_mm"


def compact_mm(self: Any, hidden: Tensor, index: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """Sum of the experts' outputs over the live slots.

    From hidden (n, h), index (n, k) int64, where ``num_experts`` marks a slot that is left out, and weights (n, k) to (n,
    h).
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    index = index.reshape(len(hidden), -1)
    if len(hidden) == 1:
        return _one_token(self, hidden, index[0].tolist(), weights.reshape(-1))
    flat = index.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    sizes = torch.bincount(flat, minlength=self.num_experts)[: self.num_experts].tolist()
    live = order[: sum(sizes)]
    token = torch.div(live, index.shape[1], rounding_mode="floor")
    rows = hidden.index_select(0, token)
    outputs = [_run_expert(self, x, expert) for expert, x in enumerate(rows.split(sizes)) if len(x)]
    result = torch.zeros_like(hidden)
    if outputs:
        weighted = torch.cat(outputs) * weights.reshape(-1)[live, None].to(hidden.dtype)
        result = result.index_add(0, token, weighted.to(hidden.dtype))
    return result


def _one_token(self: Any, hidden: Tensor, index: list[int], weights: Tensor) -> Tensor:
    """The same for a single token, as in decoding: nothing to sort."""
    result = torch.zeros_like(hidden)
    for slot, expert in enumerate(index):
        if expert < self.num_experts:
            result = result + (_run_expert(self, hidden, expert) * weights[slot]).to(hidden.dtype)
    return result


def _run_expert(experts: Any, x: Tensor, expert: int) -> Tensor:
    """One expert's output: (m, h) -> (m, h)."""
    inner = gate_of(experts)(_expert_linear(experts, x, "gate_up_proj", expert))
    return _expert_linear(experts, inner, "down_proj", expert)


def _expert_linear(experts: Any, x: Tensor, name: str, expert: int) -> Tensor:
    weight = getattr(experts, name)[expert]
    product = ((weight.t() if experts.is_transposed else weight) @ x.t()).t()
    return product + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else product


def use_compact_experts(model: Any) -> AbstractContextManager[None]:
    """While open, the model's experts are run by ``compact_mm``; afterwards by what ran them before."""
    return experts_run_by(model, NAME, compact_mm)
