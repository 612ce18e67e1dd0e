"""A base that is to be moved or converted: what its experts need of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import DataError


def require_same_values(model: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise where a conversion rounds a base: experts are bound to its values, and bands are rankings of them."""
    types: dict[torch.dtype, torch.dtype] = {}
    for name, parameter in model.named_parameters():
        old = parameter.dtype
        if not parameter.is_floating_point() or parameter.is_meta:
            continue
        if old not in types:
            types[old] = fn(torch.empty(0, dtype=old, device=parameter.device)).dtype
        new = types[old]
        if new == old or torch.equal(parameter, parameter.to(new).to(old)):
            continue
        said = [str(t).removeprefix("torch.") for t in (new, old)]
        raise DataError(
            f"As {said[0]} the base's values would be rounded (the first is of {name!r}), and its experts are bound to the "
            f"values that they were chosen on. Keep it in {said[1]}; or build experts on the base in {said[0]} (freemoe build "
            f"--dtype {said[0]}); or take one expert along as a plain model: merge_and_unload(NAME).to(torch.{said[0]})."
        )
