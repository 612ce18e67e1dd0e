"""A score of plans without data: how far each layer's output moves on random inputs, as in LExI (arXiv 2509.02753)."""

from __future__ import annotations

from typing import Any

import torch

from freemoe.hookmoe.plans.layers import decoder_layers, moe_layers

_TOKENS = 256


@torch.no_grad()
def perturbation_profile(model: Any, seed: int = 0) -> dict[tuple[int, int], float]:
    """(layer, k) -> |y_k - y| / |y| over random normal inputs, scaled as the layer's own norm scales."""
    found = {}
    generator = torch.Generator().manual_seed(seed)
    for layer in moe_layers(model):
        x = torch.randn(1, _TOKENS, layer.hidden, generator=generator)
        norm = getattr(decoder_layers(model)[layer.number], "post_attention_layernorm", None)
        weight = next(layer.block.parameters())
        x = x.to(weight.device, weight.dtype)
        x = x * norm.weight if norm is not None else x
        full = layer.k
        outputs = {}
        try:
            for k in range(1, full + 1):
                layer.set_k(k)
                output = layer.block(x)
                outputs[k] = (output[0] if isinstance(output, tuple) else output).float()
        finally:
            layer.set_k(full)
        for k in range(1, full):
            found[layer.number, k] = float((outputs[k] - outputs[full]).norm() / outputs[full].norm())
    return found
