"""Which tokens of the step that vLLM runs now are whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from freemoe.serve.vllm.masks import Parts


token_groups: list[tuple[Tensor, Parts]] = []
"""Of the step that runs now, one at a time in a worker's process: token numbers (n,) int64, and what is off for them.

The base's tokens are in none. It is changed in place, so that every module sees the same list.
"""


def tokens_of(names: Sequence[str], starts: Sequence[int]) -> dict[str, Tensor]:
    """The tokens of every expert that acts in a step.

    ``starts`` are where every request's tokens begin, and where the last one's end: one more than names.

    Returns:
        Expert -> (n,) int64, ascending.
    """
    found: dict[str, list[Tensor]] = {}
    for name, first, end in zip(names, starts, starts[1:], strict=False):
        found.setdefault(name, []).append(torch.arange(int(first), int(end)))
    return {name: torch.cat(parts) for name, parts in found.items()}
