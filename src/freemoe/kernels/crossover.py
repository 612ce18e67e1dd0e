"""At how many tokens a layer's experts are computed in which way: a rule of their widths, the same on every machine.

Few tokens are multiplied by the rows that they use, many are sorted by expert; between the two, where an expert has most of
the neurons, the whole MLP with a mask is the quickest. A rule and not a stopwatch, so that the same input is computed alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from freemoe.kernels.experts import ExpertNeurons

_NARROW = 0.6
"""Experts of such a share of the neurons are read row by row as long as they are not sorted; wider ones up to 64 tokens."""


@dataclass(frozen=True)
class KernelCrossover:
    """Where a layer changes its way.

    Attributes:
        grouped: The least number of tokens that are sorted by expert.
        few: The least number of tokens for which rows are not read one by one; what is between has a mask.
    """

    grouped: int = 256
    few: int = 256


def default_crossover(plan: ExpertNeurons) -> KernelCrossover:
    """What is likely the quickest, by the widths of the experts."""
    widest = max(len(rows) for rows in plan.rows)
    return KernelCrossover(few=256 if widest <= _NARROW * plan.neurons else 64)
