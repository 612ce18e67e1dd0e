"""At how many tokens a layer's experts are computed in which way: a default, or as measured on this machine.

Few tokens are multiplied by the rows that they use, many are sorted by expert; between the two, where an expert has most of
the neurons, the whole MLP with a mask is the quickest.

What is measured is kept by `measured`, by type and shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from freemoe.kernels.experts import Plan, Weights, can_read_rows, few, grouped, masked
from freemoe.kernels.measured import fastest, keep, known, machine_key

SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Token counts that are tried."""

_NARROW = 0.6
"""Experts of such a share of the neurons are read row by row as long as they are not sorted; wider ones up to 64 tokens."""


@dataclass(frozen=True)
class Crossover:
    """Where a layer changes its way.

    Attributes:
        grouped: The least number of tokens that are sorted by expert.
        few: The least number of tokens for which rows are not read one by one; what is between has a mask.
    """

    grouped: int = 256
    few: int = 256


def default_crossover(plan: Plan) -> Crossover:
    """What is likely, by the widths of the experts."""
    widest = max(len(rows) for rows in plan.rows)
    return Crossover(few=256 if widest <= _NARROW * plan.neurons else 64)


def _key(weights: Weights, plan: Plan) -> str:
    shape = "x".join(str(n) for n in (*weights.up.shape, len(plan.rows), max(len(r) for r in plan.rows)))
    kind = str(weights.up.dtype).removeprefix("torch.")
    return machine_key(f"{kind} {shape}")


def known_crossover(weights: Weights, plan: Plan) -> Crossover:
    """What was measured for this machine and shape, or the default."""
    found = known(_key(weights, plan))
    # One of another version lacks something, or has more.
    if not isinstance(found, dict) or set(found) != {field.name for field in fields(Crossover)}:
        return default_crossover(plan)
    return Crossover(**found)


@torch.no_grad()
def measure_crossover(weights: Weights, plan: Plan, repeats: int = 3) -> Crossover:
    """Time all ways with tokens routed at random, and keep the answer; a second or two for a large layer.

    Args:
        weights: Of a layer.
        plan: Of the layer.
        repeats: How often each way is timed; the fastest counts.
    """
    up = weights.up
    generator = torch.Generator().manual_seed(0)
    mask = plan.mask(up.dtype, up.device)

    def seconds(tokens: int) -> list[float]:
        """Of rows, mask and sorting."""
        x = torch.randn(tokens, up.shape[-1], generator=generator).to(up)
        expert = torch.randint(len(plan.rows), (tokens,), generator=generator).to(up.device)
        ways: list[Callable[[], Tensor]] = [
            lambda: masked(x, expert, weights, mask),
            lambda: grouped(x, expert, weights, plan),
        ]
        if can_read_rows(x, weights):
            return fastest((lambda: few(x, expert, weights, plan), *ways), repeats)
        return [float("inf"), *fastest(tuple(ways), repeats)]

    timed = {tokens: seconds(tokens) for tokens in SIZES}
    rows_end = next((tokens for tokens in SIZES if timed[tokens][0] > timed[tokens][1]), 2 * SIZES[-1])
    best = 2 * SIZES[-1]
    for tokens in reversed(SIZES):
        if timed[tokens][2] > min(timed[tokens][:2]):
            break
        best = tokens
    found = Crossover(grouped=best, few=min(rows_end, best))
    keep(_key(weights, plan), asdict(found))
    return found
