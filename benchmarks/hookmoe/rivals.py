"""The rival of hooks: LoRA of the same size on the attention linears, trained by the same loop on the same text."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.models.hooks import combined_hooks, forward_hook
from freemoe.models.weights import find_weights


class LowRank(nn.Module):
    """W x + B A x for every attention linear of a model, of the least rank with so many parameters; B begins at zero."""

    lowest = 0

    def __init__(self, model: Any, parameters: int, seed: int) -> None:
        super().__init__()
        weights = [w for w in find_weights(model) if w.sublayer == "attention" and isinstance(w.module, nn.Linear)]
        self.paths = [w.name.removesuffix(".weight") for w in weights]
        sizes = [(w.num_columns, w.num_rows) for w in weights]
        self.rank = -(-parameters // sum(i + o for i, o in sizes))
        generator = torch.Generator().manual_seed(seed)
        self.a = nn.ParameterList(torch.randn(self.rank, i, generator=generator) * i**-0.5 for i, _ in sizes)
        self.b = nn.ParameterList(torch.zeros(o, self.rank) for _, o in sizes)

    def attached(self, model: Any) -> AbstractContextManager[Any]:
        """While open, the linears have their low-rank partner."""

        def beside(a: Tensor, b: Tensor) -> Any:
            return lambda module, args, output: output + (args[0] @ a.T) @ b.T

        pairs = zip(self.paths, self.a, self.b, strict=True)
        return combined_hooks(*(forward_hook(model.get_submodule(path), beside(a, b)) for path, a, b in pairs))
