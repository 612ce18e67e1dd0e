"""Random experts, as many and as large as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from freemoe.domain_experts.expert import DomainExpert, switch_expert
from freemoe.domain_experts.rank.random_mask import random_mask
from freemoe.models.mask import Mask
from freemoe.models.weights import find_weights

OFF = 0.01
"""Share of the weights that an expert switches off."""


def random_experts(model: Any, names: Sequence[str], seed: int) -> list[DomainExpert]:
    """Experts that switch random single weights off."""
    weights = find_weights(model)
    first = Mask.of_indices({w.name: torch.arange(round(w.size * OFF)) for w in weights}, weights)
    return [switch_expert(name, random_mask(first, seed + i)) for i, name in enumerate(names)]
