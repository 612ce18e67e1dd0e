"""Random structures for tiny models, shared by the tests of the exported forms."""

import torch

from freemoe.models.sublayers import find_sublayers
from freemoe.tomoe.structures.structure import LayerStructure, ValueGateTensors

INNER = 16


def random_structure(model, experts=4, seed=0, share=0.5, static=False):
    """About ``share`` of everything, drawn at random; a gate for values, or a fixed choice."""
    generator = torch.Generator().manual_seed(seed)
    return [_layer(layer, experts, generator, share, static) for layer in find_sublayers(model)]


def _layer(layer, experts, generator, share, static):
    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def chosen(*shape):
        drawn = torch.rand(*shape, generator=generator) < share
        drawn[..., int(torch.randint(shape[-1], (1,), generator=generator))] = True
        return drawn

    head_dim = layer.rotary.head_dim
    gate = ValueGateTensors(
        project=normal(INNER, layer.hidden_size),
        embedding=normal(INNER),
        norm_weight=normal(INNER) + 1,
        norm_bias=normal(INNER),
        decode=normal(head_dim, INNER),
        offset=normal(head_dim),
        keep=torch.tensor(max(1, round(share * head_dim))),
    )
    return LayerStructure(
        qk=chosen(layer.rotary.num_bits),
        vo=chosen(head_dim) if static else gate,
        router_weight=normal(experts, layer.hidden_size),
        router_bias=normal(experts) * 0.1,
        experts=chosen(experts, layer.intermediate_size),
    )
