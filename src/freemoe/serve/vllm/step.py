"""Which tokens of the step that vLLM runs now are whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from freemoe.serve.vllm.masks import Parts


@dataclass
class StepMasks:
    """The step that runs now; one at a time runs in a worker's process."""

    # Token numbers (n,) int64, and what is off for them; the base's tokens are in none
    groups: list[tuple[Tensor, Parts]] = field(default_factory=list)


now = StepMasks()


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
