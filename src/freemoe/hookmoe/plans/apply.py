"""Put a plan on a model, prove that it acts, and take it off again: the only place where a gate's k is set.

``config.num_experts_per_tok`` and other copies of k are read once, when a model is made; what acts on a loaded model is the
attribute that the gate itself reads. The probe looks at what the gate gives out, not at any attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import FamilyError, RecipeError
from freemoe.hookmoe.plans.layers import MoELayer, expert_counts, moe_layers
from freemoe.hookmoe.plans.plan import LayerPlan, check_plan
from freemoe.models.hooks import combined_hooks, forward_hook, forward_pre_hook

RESCALES = ("none", "kept_mass", "renorm")


@contextmanager
def apply_plan(model: Any, plan: LayerPlan, rescale: str = "none") -> Iterator[None]:
    """While open, every layer runs as many experts as the plan says; afterwards all is bit-equal. Nests.

    Args:
        model: A mixture model.
        plan: One k per decoder layer.
        rescale: What becomes of the weights of the slots that stay. ``none``: the model's own rule at the smaller k.
            ``kept_mass``: the weight they have at full k. ``renorm``: scaled so that they sum to what all slots sum to at
            full k. The last two run the gate at full k, which costs nothing to speak of.

    Raises:
        RecipeError: The plan does not fit the model.
    """
    check_plan(plan, expert_counts(model))
    if rescale not in RESCALES:
        raise RecipeError(f"rescale is {rescale!r}; allowed: {', '.join(RESCALES)}.")
    layers = moe_layers(model)
    old = [layer.k for layer in layers]
    with ExitStack() as stack:
        try:
            for layer, full in zip(layers, old, strict=True):
                k = plan.ks[layer.number]
                assert k is not None
                if rescale == "none" or k >= full:
                    layer.set_k(k)
                else:
                    hook = partial(_truncate_output, layer, k, rescale == "renorm")
                    stack.enter_context(forward_hook(layer.gate, hook))
            yield
        finally:
            for layer, full in zip(layers, old, strict=True):
                layer.set_k(full)


def _truncate_output(
    layer: MoELayer, k: int, renorm: bool, gate: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, index = output
    return logits, *truncate_slots(weights, index, k, renorm, layer.choice_order(logits, weights, index))


def truncate_slots(
    weights: Tensor, index: Tensor, k: int, renorm: bool, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keep the k slots that the gate chose first.

    Weights and index are (tokens, slots), in any order (DeepSeek-V2 does not sort), and become (tokens, k); ``order``, the
    weights if absent, is largest at the first choice. ``renorm`` scales what is kept to the sum of all.
    """
    slot = (weights if order is None else order).topk(k, dim=-1).indices
    kept = weights.gather(-1, slot)
    if renorm:
        kept = kept * (weights.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True))
    return kept, index.gather(-1, slot)


def routed_shapes(model: Any) -> dict[int, int]:
    """Experts per token that reach each layer's experts in one forward pass of a few tokens: the shape probe."""
    seen: dict[int, int] = {}

    def record_shape(number: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = args[1] if len(args) > 1 else next(v for k, v in kwargs.items() if "ind" in k)
        seen[number] = int(index.shape[-1])

    ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    listening = combined_hooks(
        *(forward_pre_hook(m.experts, partial(record_shape, m.number), kwargs=True) for m in moe_layers(model))
    )
    with listening, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return seen


def probe_router_k(model: Any) -> None:
    """Raise unless setting a gate's k changes how many experts run, in every layer.

    Raises:
        FamilyError: A router whose k does not act; names the layers.
    """
    layers = moe_layers(model)
    counts = expert_counts(model)
    for k in (1, 2):
        wanted = LayerPlan(tuple(None if c is None else min(k, c) for c in counts))
        with apply_plan(model, wanted):
            seen = routed_shapes(model)
        dead = [layer for layer in layers if seen.get(layer.number) != wanted.ks[layer.number]]
        if dead:
            first = dead[0]
            raise FamilyError(
                f"The router's k does not act: {first.path} ran {seen.get(first.number)} experts per token after "
                f"{type(first.gate).__name__}.{first.attribute} was set to {wanted.ks[first.number]} (layers concerned: "
                f"{[layer.number for layer in dead]}). Correct the gate's row in src/freemoe/models/spec.py."
            )
