"""A transformers decoder layer as the kernels take it; None where it holds anything that they do not know.

What is read here is the layout that Mixtral, OLMoE and Qwen3-MoE share. Nothing is taken on trust: `quick` holds some tokens of
every layer against the layer's own forward.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from freemoe.compat.transformers import are_plain_experts
from freemoe.hookmoe.hooks.hook import Hook
from freemoe.hookmoe.plans.dynamic import router_renormalises
from freemoe.hookmoe.plans.layers import MoELayer
from freemoe.kernels.one_token import (
    AttentionWeights,
    BottleneckHook,
    LayerWeights,
    LinearWeights,
    MixtureWeights,
    RMSNormWeights,
    one_token_available,
)
from freemoe.kernels.rows import ACTIVATIONS

_NORMS = ("input_layernorm", "post_attention_layernorm")
_CHILDREN = {"self_attn", "mlp", *_NORMS}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def layer_of(
    model: Any, layer: nn.Module, moe: MoELayer, active: int, renormalise: bool, hook: Hook | None, before: bool
) -> LayerWeights | None:
    """A layer's tensors, or None.

    ``active`` experts run; ``renormalise`` scales their weights to the sum of all that the gate chooses; ``before``: the
    hook bends what the mixture sees.
    """
    children = dict(layer.named_children())
    if set(children) != _CHILDREN or children["mlp"] is not moe.block:
        return None
    found, mixture = _bind_attention(children["self_attn"]), _bind_mixture(model, moe, active, renormalise)
    norms = [_bind_norm(children[name]) for name in _NORMS]
    if found is None or mixture is None or norms[0] is None or norms[1] is None:
        return None
    bound = hook and BottleneckHook(_bind_linear(hook.up), _bind_linear(hook.down), float(hook.r), before)
    made = LayerWeights(norms[0], found, norms[1], mixture, bound)
    return made if one_token_available(made) else None


def _bind_attention(attention: nn.Module) -> AttentionWeights | None:
    children = dict(attention.named_children())
    if not children.keys() >= set(_PROJECTIONS) or children.keys() - set(_PROJECTIONS) - {"q_norm", "k_norm"}:
        return None
    projections = [children[name] for name in _PROJECTIONS]
    if any(type(part) is not nn.Linear for part in projections):
        return None
    norms = []
    for name in ("q_norm", "k_norm"):
        norms.append(_bind_norm(children.get(name)))
        if name in children and norms[-1] is None:
            return None
    head_dim, scale = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
    if not isinstance(head_dim, int) or not isinstance(scale, float):
        return None
    clip = getattr(attention.config, "clip_qkv", None) or 0.0
    query, key, value, output = (_bind_linear(part) for part in projections)
    return AttentionWeights(query, key, value, output, norms[0], norms[1], head_dim, scale, float(clip))


def _bind_mixture(model: Any, moe: MoELayer, active: int, renormalise: bool) -> MixtureWeights | None:
    experts: Any = moe.experts
    gate: Any = moe.gate
    if not are_plain_experts(experts):
        return None
    # Shared experts, and gates with a bias or groups of experts, have more than these.
    more = [
        dict(moe.block.named_children()).keys() - {"gate", "experts"},
        dict(moe.gate.named_parameters()).keys() - {"weight"},
    ]
    activation = getattr(model.config.get_text_config(), "hidden_act", None)
    if any(more) or activation not in ACTIVATIONS:
        return None
    normalise, active = router_renormalises(model), min(active, moe.k)
    up, down = experts.gate_up_proj, experts.down_proj
    return MixtureWeights(gate.weight, up, down, activation, moe.k, active, normalise, renormalise)


def _bind_norm(norm: nn.Module | None) -> RMSNormWeights | None:
    eps = getattr(norm, "variance_epsilon", None)
    if norm is None or eps is None or set(dict(norm.named_parameters())) != {"weight"}:
        return None
    return RMSNormWeights(norm.weight, float(eps))  # pyright: ignore[reportArgumentType]


def _bind_linear(linear: Any) -> LinearWeights:
    return LinearWeights(linear.weight, linear.bias)
