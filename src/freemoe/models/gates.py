"""Routers that leave experts out: what is off as a whole is never chosen, as in the model that is cut.

An expert whose weights are all zero would still take tokens, and give nothing. So wherever all weights of a routed expert
are off, its layer's router chooses among the others by its own rule, whatever that rule is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from freemoe.models.hooks import combined_hooks, replace_method
from freemoe.models.mask import Mask
from freemoe.models.weights import MoERouter, WeightMatrix

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How configurations and routers name their number of routed experts."""


class _SubsetRouter:
    """The forward of a router that chooses among some of its experts.

    Args:
        gate: The router; its forward returns (logits, weights, index).
        mask: ``(experts,)``: experts at 0 are left out; the weights of the others are multiplied by theirs.
    """

    def __init__(self, gate: Any, mask: Tensor) -> None:
        outer = gate.__dict__.get("forward")
        nested = isinstance(outer, _SubsetRouter)
        self.gate, self.mask = gate, mask
        # Two that are nested leave out what either does; the router's own rule runs once.
        self.forward: Callable[..., Any] = outer.forward if nested else gate.forward
        self.open = mask.detach() != 0
        if nested:
            self.open &= outer.open.to(mask.device)
        # Once and not in every pass: an accelerator stops to count.
        self.experts = self.open.nonzero().flatten()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.gate.parameters()).device
        mask, experts = self.mask.to(device), self.experts.to(device)
        with smaller_gate(self.gate, experts, len(mask)):
            logits, weights, index = self.forward(*args, **kwargs)
        index = experts[index]
        full = logits.new_full((*logits.shape[:-1], len(mask)), -torch.inf)
        return full.index_copy(-1, experts, logits), weights * mask[index].to(weights.dtype), index


@contextmanager
def restrict_router(gate: Any, mask: Tensor) -> Iterator[None]:
    """Inside, a router leaves out the experts at 0 of ``mask`` ``(experts,)`` and scales the others; it nests."""
    with replace_method(gate, _SubsetRouter(gate, mask)):
        yield


@contextmanager
def smaller_gate(gate: Any, experts: Tensor, count: int) -> Iterator[None]:
    """Inside, a router knows only some experts: its own rule chooses among them, whatever that rule is."""
    tensors = {
        (store, name): tensor
        for store in ("_parameters", "_buffers")
        for name, tensor in getattr(gate, store).items()
        if tensor is not None and tensor.ndim and tensor.shape[0] == count
    }
    numbers = {name: value for name, value in vars(gate).items() if name in EXPERT_COUNTS and value == count}
    try:
        for (store, name), tensor in tensors.items():
            getattr(gate, store)[name] = tensor.detach()[experts]
        for name in numbers:
            setattr(gate, name, len(experts))
        yield
    finally:
        for (store, name), tensor in tensors.items():
            getattr(gate, store)[name] = tensor
        for name, value in numbers.items():
            setattr(gate, name, value)


def left_out(weights: Sequence[WeightMatrix], mask: Mask) -> list[tuple[Any, Tensor]]:
    """The routers some of whose experts are off as a whole, and which may still be chosen.

    Returns:
        Per router its module and ``(experts,)`` floats, 1 for those that may be chosen. A router that would be left with fewer
        experts than it gives a token is not among them: it has no choice.
    """
    # The matrices of a layer's experts share one router.
    off: dict[MoERouter, Tensor] = {}
    for weight in weights:
        if weight.gate is None:
            continue
        own, each = mask.get(weight.name), weight.num_rows * weight.num_columns
        whole = torch.zeros(weight.num_experts, dtype=torch.bool, device=weight.device)
        # Fewer than an expert has weights are no whole expert.
        if own is not None and own.count >= each:
            whole = (own.count_per_row(each) == each).to(weight.device)
        off[weight.gate] = off.get(weight.gate, torch.ones_like(whole)) & whole
    return [
        (router.module, (~gone).to(torch.float32))
        for router, gone in off.items()
        if bool(gone.any()) and int((~gone).sum()) >= router.experts_per_token
    ]


def exclude_experts(routers: Sequence[tuple[Any, Tensor]]) -> AbstractContextManager[None]:
    """Inside, every router of `left_out` leaves out what it says."""
    return combined_hooks(*(restrict_router(gate, mask) for gate, mask in routers))
