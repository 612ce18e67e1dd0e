"""While open, a token that is decoded alone goes through compiled loops: fewer calls per token, and memory at its full speed.

Which way a layer goes follows from its classes, shapes and dtype alone, so that the same input is computed alike in every run:
the loops take every layer that they know, once they have computed the same as the layer's own forward on fixed tokens. All
else stays with the model: prompts, batches, masks, gradients, and layers on which somebody has put a hook of his own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from freemoe.hookmoe.decoding.binding import layer_of
from freemoe.hookmoe.hooks.hook import HookSet
from freemoe.hookmoe.plans.layers import decoder_layers, moe_layers
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.kernels.one_token import CompiledLayer, LayerWeights, LinearWeights, compiled_linear
from freemoe.kernels.rows import rows_available
from freemoe.models.hooks import hook_count, replace_method

NUM_PROBES = 5
"""Tokens that a layer computes in both ways before the loops take it over."""

# Of a hidden state's size before the first layer; so what the layer adds is not lost in the rounding of what it is added to.
_PROBE_STD = 0.02

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Median difference of the two ways on the probes, over the largest value that the layer adds. In bfloat16 single tokens differ
by more: where two experts are equally likely, rounding decides."""

_AGREES: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()
"""Decoder layer -> what is computed in it -> whether the loops compute the same."""


@contextmanager
def quick_decoding(
    model: Any, plan: LayerPlan | None = None, hooks: HookSet | None = None, rescale: str = "none"
) -> Iterator[None]:
    """While open, single tokens on a CPU run in compiled loops where those compute the same; afterwards all is as before.

    ``plan``, ``hooks`` and ``rescale`` are on the model already.
    """
    found = {layer.number: layer for layer in moe_layers(model)}
    by_layer = {} if hooks is None else dict(hooks.items())
    before = hooks is not None and hooks.position == "pre"
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for number, layer in enumerate(decoder_layers(model)):
        if number not in found:
            continue
        moe, hook = found[number], by_layer.get(number)
        full = moe.k
        active = full if plan is None or rescale == "none" else min(plan.ks[number] or full, full)
        make = partial(layer_of, model, layer, moe, active, rescale == "renorm" and active < full, hook, before)
        standing = {moe.gate: int(active < full), moe.block: int(hook is not None)}
        if hook is not None and before and hooks is not None and hooks.scope != "block":
            standing = {moe.gate: 1 + int(active < full), moe.experts: 1}
        forwards[layer] = _OneTokenForward(layer, make, standing)
    output_head = model.get_output_embeddings()
    if type(output_head) is nn.Linear:
        forwards[output_head] = _OneTokenHead(output_head)
    with ExitStack() as stack:
        for module, forward in forwards.items():
            # A module whose forward somebody else has exchanged is left alone.
            if "forward" not in vars(module):
                stack.enter_context(replace_method(module, forward))
        yield


class _OneTokenForward:
    """The forward of a decoder layer.

    ``make`` gives its tensors or None; ``standing``: how many hooks stand on which of its modules by our own doing, on all
    others none does.
    """

    def __init__(self, layer: nn.Module, make: Callable[[], Any], standing: dict[nn.Module, int]) -> None:
        self.layer, self.make = layer, make
        self.number = int(getattr(getattr(layer, "self_attn", None), "layer_idx", 0))
        self.original: Callable[..., Any] = layer.forward
        self.modules = [(m, standing.get(m, 0)) for m in layer.modules() if m is not layer]
        self.weight: Tensor | None = None
        self.address = 0
        self.step: CompiledLayer | None = None
        self.tried = False

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._is_applicable(hidden_states, args, kwargs):
            return self.original(hidden_states, *args, **kwargs)
        if not self.tried:
            self.tried, self.step = True, self._verified_step(hidden_states, kwargs)
        cache = kwargs["past_key_values"]
        if self.step is None or (self.weight is not None and self.weight.data_ptr() != self.address):
            return self.original(hidden_states, *args, **kwargs)
        return self._run_step(self.step, hidden_states, kwargs["position_embeddings"], cache, self.number)

    def _is_applicable(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if (self.tried and self.step is None) or x.shape[:-1] != (1, 1) or args or torch.is_grad_enabled():
            return False
        if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is None or self.layer.training:
            return False
        return x.device.type == "cpu" and not torch.compiler.is_compiling() and self._has_no_foreign_hooks()

    def _has_no_foreign_hooks(self) -> bool:
        """Whether nothing stands on the layer's modules but what we put there."""
        return all(hook_count(module) == count and "forward" not in vars(module) for module, count in self.modules)

    @staticmethod
    def _run_step(step: CompiledLayer, x: Tensor, places: Any, cache: Any, number: int) -> Tensor:
        cos, sin = places
        return step.decode_token(x[0, 0], cos[0, 0], sin[0, 0], lambda k, v: cache.update(k, v, number)).view(1, 1, -1)

    def _verified_step(self, x: Tensor, kwargs: dict[str, Any]) -> CompiledLayer | None:
        """The loops, if they know the layer and compute what it does."""
        layer: LayerWeights | None = self.make()
        if layer is None:
            return None
        step, mixture = CompiledLayer(layer), layer.mixture
        key = (
            x.dtype,
            mixture.active,
            mixture.renormalise,
            layer.hook is not None and layer.hook.before,
            layer.hook is None,
        )
        known = _AGREES.setdefault(self.layer, {})
        if key not in known:
            known[key] = self._outputs_match(step, x, kwargs)
        self.weight, self.address = mixture.up, mixture.up.data_ptr()
        return step if known[key] else None

    def _outputs_match(self, step: CompiledLayer, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether both ways compute the same, on tokens and places that have nothing to do with what was asked."""
        generator = torch.Generator().manual_seed(0)
        caches, differences = (DynamicCache(), DynamicCache()), []
        width = kwargs["position_embeddings"][0].shape[-1] // 2
        for _ in range(NUM_PROBES):
            angles = (2 * torch.pi * torch.rand(1, 1, width, generator=generator)).repeat(1, 1, 2)
            places = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            token = (_PROBE_STD * torch.randn(x.shape, generator=generator)).to(x.dtype)
            want = self.original(token, **kwargs | {"position_embeddings": places, "past_key_values": caches[0]})
            got = self._run_step(step, token, places, caches[1], self.number)
            differences.append(float((got - want).abs().max() / (want - token).abs().max()))
        # NaN, as of a layer that adds nothing, says no.
        return float(torch.tensor(differences).median()) <= TOLERANCE[x.dtype]


class _OneTokenHead:
    """The forward of a linear layer: one token by the loops, all else by the layer itself."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear, self.original = linear, linear.forward

    def __call__(self, x: Tensor) -> Tensor:
        one = x.numel() == x.shape[-1] and x.device.type == "cpu" and not torch.is_grad_enabled()
        weight, bias = self.linear.weight, self.linear.bias
        fits = weight.dtype == x.dtype and weight.is_contiguous() and rows_available(x.dtype)
        if not one or torch.compiler.is_compiling() or not fits:
            return self.original(x)
        return compiled_linear(x.flatten(), LinearWeights(weight, bias)).view(*x.shape[:-1], -1)
