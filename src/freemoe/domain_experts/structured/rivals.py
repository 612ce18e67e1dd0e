"""Other rankings of units, at equal counts: what learning has to beat. Pure functions; low scores go off first.

All are of one pass over the same documents (`ranking.measure_importance`) and of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from freemoe.domain_experts.structured.ranking import UnitImportance
from freemoe.domain_experts.structured.units import LayerUnits, ModelUnits

Rival = Callable[[LayerUnits, UnitImportance], Tensor]


def wanda_scores(columns: Tensor, energy: Tensor) -> Tensor:
    """|W| * ||X|| summed over what reads a unit (Wanda, Sun et al. 2024, in its structured form).

    From ``columns`` (rows, count, width) of the linear that reads the units and ``energy`` (count, width) mean squared
    inputs to (count,) float32.
    """
    return (columns.float().abs().sum(0) * energy.sqrt()).sum(1)


def taylor_scores(gain: Tensor) -> Tensor:
    """|sum of w * dL/dw| over a unit's output weights (LLM-Pruner, Ma et al. 2023, first order): (count,).

    The sum over all weights by which a unit enters the residual stream is dL/dm, the derivative by a factor on them.
    """
    return gain.abs()


RIVALS: dict[str, Rival] = {
    "wanda": lambda layer, worth: wanda_scores(
        layer.parts[-1].weight.canonical_view()[0].unflatten(1, (layer.count, -1)), worth.energy
    ),
    "taylor": lambda layer, worth: taylor_scores(worth.gain),
    # The norm of what a unit gives.
    "activation": lambda layer, worth: worth.energy.sum(1).sqrt(),
}
"""Those that need no seed."""

_NEED_INPUTS = ("wanda", "activation")


def rival_scores(units: ModelUnits, worths: Sequence[UnitImportance]) -> dict[str, list[Tensor]]:
    """Scores of every rival that fits this kind of units, per layer.

    Layers and experts are not read by one linear, so that rivals of norms say nothing about them.
    """
    fit = [n for n in RIVALS if n not in _NEED_INPUTS or units.kind in ("neuron", "kv_group")]
    return {n: [RIVALS[n](layer, w) for layer, w in zip(units.layers, worths, strict=True)] for n in fit}


def random_scores(units: ModelUnits, seed: int) -> list[Tensor]:
    """Uniform scores in [0, 1), one tensor (units,) per layer."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(layer.count, generator=generator) for layer in units.layers]
