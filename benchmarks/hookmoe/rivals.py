"""The rival of hooks: LoRA of the same size on the attention linears, trained by the same loop on the same text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.hookmoe.plans.layers import decoder_layers
from freemoe.models.hooks import forward_hook
from freemoe.models.spec import family_of


class LowRank(nn.Module):
    """W x + B A x for every attention linear of a model, of the least rank with so many parameters; B begins at zero."""

    lowest = 0

    def __init__(self, model: Any, parameters: int, seed: int) -> None:
        super().__init__()
        self.paths = [
            (number, path)
            for number, layer in enumerate(decoder_layers(model))
            for group in family_of(model).attention
            for path in group
            if _linear(layer, path) is not None
        ]
        linears = [_linear(decoder_layers(model)[n], path) for n, path in self.paths]
        sizes = [(m.in_features, m.out_features) for m in linears if m is not None]
        self.rank = -(-parameters // sum(i + o for i, o in sizes))
        generator = torch.Generator().manual_seed(seed)
        self.a = nn.ParameterList(torch.randn(self.rank, i, generator=generator) * i**-0.5 for i, _ in sizes)
        self.b = nn.ParameterList(torch.zeros(o, self.rank) for _, o in sizes)

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """While open, the linears have their low-rank partner."""
        with ExitStack() as stack:
            for (number, path), a, b in zip(self.paths, self.a, self.b, strict=True):
                linear = decoder_layers(model)[number].get_submodule(path)

                def beside(module: nn.Module, args: Any, output: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                    return output + (args[0] @ a.T) @ b.T

                stack.enter_context(forward_hook(linear, beside))
            yield


def _linear(layer: nn.Module, path: str) -> nn.Linear | None:
    try:
        found = layer.get_submodule(path)
    except AttributeError:
        return None
    return found if isinstance(found, nn.Linear) else None
