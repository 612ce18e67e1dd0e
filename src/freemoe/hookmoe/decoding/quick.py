"""While open, a token that is decoded alone goes through compiled loops: fewer calls per token, and memory at its full speed.

A layer's first tokens are computed in both ways. The loops take it over where they agree and are not slower; else the layer
stays as it is. So it does for prompts, batches, masks, gradients, and for whoever put a hook of his own on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from freemoe.hookmoe.decoding.binding import layer_of
from freemoe.hookmoe.hooks.hook import Hooks
from freemoe.hookmoe.plans.layers import MoELayer, decoder_layers, moe_layers
from freemoe.hookmoe.plans.plan import Plan
from freemoe.kernels.one_token import Compiled, Layer, Linear, times
from freemoe.kernels.rows import rows_available
from freemoe.models.hooks import hook_count

TRIED = 8
"""Tokens that a layer computes in both ways before it is decided."""

_SLOWER = 1.2
"""The loops have to be so much slower to be left alone: shorter timings say no more."""

_FOUND: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()
"""Decoder layer -> what makes a case of it -> whether the loops were taken."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@contextmanager
def quick_decoding(
    model: Any, plan: Plan | None = None, hooks: Hooks | None = None, rescale: str = "none"
) -> Iterator[None]:
    """While open, single tokens on a CPU run in compiled loops where those compute the same; afterwards all is as before.

    Args:
        model: A mixture model, with ``plan``, ``hooks`` and ``rescale`` on it already.
        plan: As in `plans.apply.applied`.
        hooks: As in `Hooks.attached`.
        rescale: As in `plans.apply.applied`.
    """
    found = {layer.number: layer for layer in moe_layers(model)}
    by_layer = {} if hooks is None else dict(hooks.items())
    before = hooks is not None and hooks.position == "pre"
    replaced: list[nn.Module] = []
    try:
        for number, layer in enumerate(decoder_layers(model)):
            if number not in found:
                continue
            own, hook = found[number], by_layer.get(number)
            full = own.k
            kept = full if plan is None or rescale == "none" else min(plan.ks[number] or full, full)

            def make(layer: nn.Module = layer, own: MoELayer = own, kept: int = kept, hook: Any = hook) -> Any:
                return layer_of(model, layer, own, kept, rescale == "renorm" and kept < own.k, hook, before)

            standing = {own.gate: int(kept < full), own.block: int(hook is not None)}
            if hook is not None and before and hooks is not None and hooks.scope != "block":
                standing = {own.gate: 1 + int(kept < full), own.experts: 1}
            _replace(layer, _Decoding(layer, make, standing), replaced)
        head = model.get_output_embeddings()
        if type(head) is nn.Linear:
            _replace(head, _Head(head), replaced)
        yield
    finally:
        for module in reversed(replaced):
            module.__dict__.pop("forward", None)


def _clock() -> Callable[[], float]:
    """What times two ways of one thread: the processor's time, which others on the machine do not lengthen."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _replace(module: nn.Module, forward: Callable[..., Any], replaced: list[nn.Module]) -> None:
    """A module whose forward somebody else has exchanged is left alone."""
    if "forward" not in vars(module):
        module.__dict__["forward"] = forward
        replaced.append(module)


class _Decoding:
    """The forward of a decoder layer.

    Args:
        layer: The layer.
        make: Gives its tensors, or None.
        standing: How many hooks stand on which of its modules by our own doing; on all others none does.
    """

    def __init__(self, layer: nn.Module, make: Callable[[], Any], standing: dict[nn.Module, int]) -> None:
        self.layer, self.make = layer, make
        self.number = int(getattr(getattr(layer, "self_attn", None), "layer_idx", 0))
        self.own: Callable[..., Any] = layer.forward
        self.modules = [(m, standing.get(m, 0)) for m in layer.modules() if m is not layer]
        self.weight: Tensor | None = None
        self.address = 0
        self.step: Compiled | None = None
        self.tried = False

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own."""
        if not self._applies(hidden_states, args, kwargs):
            return self.own(hidden_states, *args, **kwargs)
        if not self.tried:
            self.tried, self.step = True, self._proven(hidden_states, kwargs)
        cache = kwargs["past_key_values"]
        if self.step is None or (self.weight is not None and self.weight.data_ptr() != self.address):
            return self.own(hidden_states, *args, **kwargs)
        return self._stepped(self.step, hidden_states, kwargs["position_embeddings"], cache, self.number)

    def _applies(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if (self.tried and self.step is None) or x.shape[:-1] != (1, 1) or args or torch.is_grad_enabled():
            return False
        if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is None or self.layer.training:
            return False
        return x.device.type == "cpu" and not torch.compiler.is_compiling() and self._untouched()

    def _untouched(self) -> bool:
        """Whether nothing stands on the layer's modules but what we put there."""
        return all(hook_count(module) == count and "forward" not in vars(module) for module, count in self.modules)

    @staticmethod
    def _stepped(step: Compiled, x: Tensor, places: Any, cache: Any, number: int) -> Tensor:
        cos, sin = places
        return step.step(x[0, 0], cos[0, 0], sin[0, 0], lambda k, v: cache.update(k, v, number)).view(1, 1, -1)

    def _proven(self, x: Tensor, kwargs: dict[str, Any]) -> Compiled | None:
        """The loops, if they agree with the layer's own forward on some tokens and take no longer."""
        layer = self.make()
        if layer is None:
            return None
        step, places = Compiled(layer), kwargs["position_embeddings"]
        # What was found once holds for the same tensors, whenever they are opened again.
        tensors = [layer.mixture.up, layer.mixture.down, *([] if layer.hook is None else [layer.hook.up.weight])]
        own = (layer.mixture.asked, layer.mixture.kept, layer.mixture.renormalise)
        key = (*own, torch.get_num_threads(), *(t.data_ptr() for t in tensors))
        if (known := _FOUND.setdefault(self.layer, {}).get(key)) is not None:
            return self._bound(layer, step) if known else None
        _FOUND[self.layer][key] = agreed = self._agrees(step, x, places, kwargs)
        return self._bound(layer, step) if agreed else None

    def _bound(self, layer: Layer, step: Compiled) -> Compiled:
        self.weight, self.address = layer.mixture.up, layer.mixture.up.data_ptr()
        return step

    def _agrees(self, step: Compiled, x: Tensor, places: Any, kwargs: dict[str, Any]) -> bool:
        """Whether both ways compute the same, and the loops take no longer."""
        generator = torch.Generator().manual_seed(0)
        caches, seconds = (DynamicCache(), DynamicCache()), [float("inf"), float("inf")]
        clock = _clock()
        cos, sin = places
        for _ in range(TRIED):
            # Each token stands elsewhere: turned by one and the same angle, queries and keys meet as if by none.
            places = (places[0] * cos - places[1] * sin, places[1] * cos + places[0] * sin)
            kwargs = kwargs | {"position_embeddings": places}
            token = x + x.std() * torch.randn(x.shape, generator=generator).to(x.dtype)
            began = clock()
            want = self.own(token, **kwargs | {"past_key_values": caches[0]})
            middle = clock()
            got = self._stepped(step, token, places, caches[1], self.number)
            seconds = [min(seconds[0], middle - began), min(seconds[1], clock() - middle)]
            largest = float((want - token).abs().max())
            if not float((got - want).abs().max()) <= _TOLERANCE[x.dtype] * max(largest, 1e-6):
                return False
        return seconds[1] <= _SLOWER * seconds[0]


class _Head:
    """The forward of a linear layer: one token by the loops where they are the faster."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear, self.own = linear, linear.forward
        self.quicker: bool | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """As the layer's own."""
        one = x.numel() == x.shape[-1] and x.device.type == "cpu" and not torch.is_grad_enabled()
        if self.quicker is False or not one or torch.compiler.is_compiling() or not self._fits(x):
            return self.own(x)
        if self.quicker is None:
            self.quicker = self._measured(x)
        return self._times(x) if self.quicker else self.own(x)

    def _fits(self, x: Tensor) -> bool:
        weight = self.linear.weight
        return weight.dtype == x.dtype and weight.is_contiguous() and rows_available(x.dtype)

    def _times(self, x: Tensor) -> Tensor:
        return times(x.flatten(), Linear(self.linear.weight, self.linear.bias)).view(*x.shape[:-1], -1)

    def _measured(self, x: Tensor) -> bool:
        self._times(x)
        clock = _clock()
        seconds = {False: float("inf"), True: float("inf")}
        for _ in range(TRIED):
            for quick, way in ((False, self.own), (True, self._times)):
                began = clock()
                way(x)
                seconds[quick] = min(seconds[quick], clock() - began)
        return seconds[True] <= _SLOWER * seconds[False]
