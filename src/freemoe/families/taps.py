"""Taps: see what every weight multiplies. The one owner of hooks on a base model's inputs.

Fused experts are read by a pre-hook too, which recomputes the intermediate activation where the down
projection's input is asked for. It costs up to two thirds of the experts' work once more, and in return the
model computes exactly what it computes without taps, under any ``experts_implementation``, and taps nest like
all hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freemoe.errors import FamilyError
from freemoe.families.spec import Experts, family_of, modules_seen
from freemoe.families.weights import Weight

OnInput = Callable[[str, int, Tensor, Tensor], None]


@contextmanager
def tapped(model: nn.Module, weights: Sequence[Weight], on_input: OnInput) -> Iterator[None]:
    """While open, call ``on_input(tap, expert, x, token)`` for every input that a weight multiplies.

    A dense tap calls once per forward (expert 0); a tap of fused experts calls once per expert that some
    token was routed to. Outputs are bit-equal to those without taps. Taps nest, and are gone afterwards, also
    after an error.

    Args:
        model: The model that ``weights`` were found in.
        weights: From ``find_weights``; their distinct taps are listened to.
        on_input: Gets the tap's name, the expert's number, x (tokens, columns) detached, and token (tokens,)
            int64: for each row of x its index in the flattened (batch * sequence) of this forward. The caller
                drops padding.

    Raises:
        FamilyError: A tap's module is not in this model.
    """
    handles: list[Any] = []
    try:
        fused: dict[str, set[str]] = {}
        for tap, layout in dict.fromkeys((w.tap, w.layout.startswith("experts")) for w in weights):
            if layout:
                fused.setdefault(tap.rpartition(".")[0], set()).add(tap)
            else:
                handles.append(_module(model, tap).register_forward_pre_hook(_dense(tap, on_input), with_kwargs=True))
        for path, taps in fused.items():
            experts = family_of(model).experts
            if experts is None:
                raise FamilyError(f"{path} is asked for, but family {family_of(model).name!r} has no fused experts.")
            hook = _experts(path, taps, experts, on_input)
            handles.append(_module(model, path).register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise FamilyError(
            f"No module {path!r} to tap in {type(model).__name__}; {modules_seen(model)}. Find the weights "
            "in the same model object that is tapped."
        ) from error


def _dense(tap: str, on_input: OnInput) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = (args[0] if args else next(iter(kwargs.values()))).detach()
        # Some families flatten (batch, sequence) before a linear, some do not; the order of tokens is the
        # same.
        x = x.reshape(-1, x.shape[-1])
        on_input(tap, 0, x, torch.arange(x.shape[0], device=x.device))

    return hook


def _experts(path: str, taps: set[str], experts: Experts, on_input: OnInput) -> Callable[..., None]:
    up, down = f"{path}.{experts.up}", f"{path}.{experts.down}"

    @torch.no_grad()
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Families name these arguments differently; their order is always hidden states, index, weights.
        hidden, index, *_ = inspect.signature(module.forward).bind(*args, **kwargs).arguments.values()
        hidden = hidden.detach().reshape(-1, hidden.shape[-1])
        index = index.reshape(hidden.shape[0], -1)
        for expert in range(getattr(module, experts.up).shape[0]):
            # An index equal to the number of experts marks a dropped slot and is never met here.
            token = (index == expert).any(dim=1).nonzero().squeeze(1)
            if token.numel() == 0:
                continue
            x = hidden[token]
            if up in taps:
                on_input(up, expert, x, token)
            if down in taps:
                on_input(down, expert, _intermediate(module, experts, expert, x), token)

    return hook


def _intermediate(module: Any, experts: Experts, expert: int, x: Tensor) -> Tensor:
    """What the down projection of one expert multiplies: (tokens, intermediate)."""
    weight = getattr(module, experts.up)[expert]
    bias = getattr(module, experts.up_bias)[expert] if experts.up_bias else None
    out = F.linear(x, weight.t() if experts.layout.endswith("columns") else weight, bias)
    return module._apply_gate(out)
