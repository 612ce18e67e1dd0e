"""Where a layer changes its way, by the widths of its experts."""

from __future__ import annotations

import pytest

from freemoe.kernels.crossover import KernelCrossover, default_crossover
from freemoe.kernels.experts import ExpertNeurons
from tests.kernels.test_experts import NEURONS, layer


@pytest.mark.parametrize(("share", "few"), [(0.3, 256), (0.9, 64)])
def test_wide_experts_have_a_mask_between_few_tokens_and_many(share: float, few: int) -> None:
    assert default_crossover(ExpertNeurons(layer(share=share)[1], NEURONS)) == KernelCrossover(grouped=256, few=few)
