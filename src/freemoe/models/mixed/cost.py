"""Which way of running several experts is quicker for how many rows: a default, or as measured on this machine.

A walk through the places costs what is off for every few rows. Masked copies cost the whole weight once, and then nothing; one
call per expert reads it as often as there are experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from freemoe.kernels.measured import fastest, keep, known, machine_key
from freemoe.models.mask import TensorMask
from freemoe.models.mixed.linear import Plan, Scratch, can_be_walked, mixed
from freemoe.models.mixed.parts import Part
from freemoe.models.mixed.rows import Assignment
from freemoe.models.weights import Weight

SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Rows that are tried."""

_EXPERTS, _SHARE = 4, 0.01


@dataclass(frozen=True)
class Cost:
    """Where the quickest way changes, for a shape and type.

    Attributes:
        few: Up to so many rows places are walked through, where there are compiled loops for it.
        copies: From so many rows on masked copies are quicker than one call per expert.
    """

    few: int = 256
    copies: int = 512


def _kind(weight: Weight) -> str:
    kind = str(weight.parameter.dtype).removeprefix("torch.")
    return f"{weight.device.type} {kind} {weight.layout} {weight.rows}x{weight.columns}"


def _key(weight: Weight) -> str:
    return machine_key(f"mixed {_kind(weight)}")


def known_cost(weight: Weight) -> Cost:
    """What was measured for this machine and shape, or the default."""
    found = known(_key(weight))
    # One of another version lacks something, or has more.
    if not isinstance(found, dict) or set(found) != {field.name for field in fields(Cost)}:
        return Cost()
    return Cost(**found)


def worth_mixing(weights: Sequence[Weight], rows: int) -> bool:
    """Whether one forward pass for all experts is quicker than one for each, by most of the numbers of a base.

    Args:
        weights: From ``find_weights``.
        rows: That a linear is given.
    """
    seen: dict[str, Cost] = {}
    good = total = 0
    for weight in weights:
        key = _kind(weight)
        cost = seen[key] if key in seen else seen.setdefault(key, known_cost(weight))
        total += weight.size
        if rows >= cost.copies or (rows <= cost.few and can_be_walked(weight)):
            good += weight.size
    return 2 * good >= total


@torch.no_grad()
def measure_costs(weights: Sequence[Weight], repeats: int = 3) -> dict[str, dict[str, int]]:
    """Time all ways on one weight of every shape, with experts drawn at random, and keep the answers; a second or two per shape.

    Args:
        weights: From ``find_weights``, untouched.
        repeats: How often each way is timed; the fastest counts.

    Returns:
        Shape and type -> what was found.
    """
    found: dict[str, dict[str, int]] = {}
    for weight in weights:
        if _kind(weight) in found or weight.fused or weight.stored is not None:
            continue
        cost = asdict(_measured(weight, repeats))
        found[_kind(weight)] = cost
        keep(_key(weight), cost)
    return found


def _measured(weight: Weight, repeats: int) -> Cost:
    names = [str(number) for number in range(_EXPERTS)]
    parts = {name: Part.of(_drawn(weight, int(name)), weight) for name in names}
    plan = Plan.of(weight, nn.Module(), Assignment(names), parts)
    own = weight.parameter.detach()
    drawn = torch.randn(SIZES[-1], weight.columns, generator=torch.Generator().manual_seed(0)).to(own)
    matrix, scratch = weight.arrange(own)[0], Scratch()
    timed: list[list[float]] = []
    for size in SIZES:
        x = drawn[:size]
        walk, copy = (partial(mixed, plan, x, _never, loops, scratch) for loops in (True, False))
        ways = [copy, partial(_each, x, matrix), *([walk] if can_be_walked(weight) else [])]
        seconds = fastest(tuple(partial(_done, way, own) for way in ways), repeats)
        timed.append([*seconds, math.inf][:3])
    few = next((n for n, (copy, _, walk) in enumerate(timed) if walk > copy), len(SIZES))
    slower = [n for n, (copy, each, _) in enumerate(timed) if copy > each]
    copies = [*SIZES, 2 * SIZES[-1]][slower[-1] + 1 if slower else 0]
    return Cost(few=SIZES[few - 1] if few else 0, copies=copies)


def _done(way: Callable[[], object], own: Tensor) -> None:
    """Call it, and wait until the device has done it."""
    way()
    if own.device.type == "cuda":
        torch.cuda.synchronize(own.device)


def _each(x: Tensor, matrix: Tensor) -> None:
    """One product per expert, as in one call for each."""
    for part in x.chunk(_EXPERTS):
        functional.linear(part, matrix)


def _never(x: Tensor) -> Tensor:
    raise AssertionError("every row has an expert here")


def _drawn(weight: Weight, seed: int) -> TensorMask:
    chosen = np.random.default_rng(seed).choice(weight.size, max(1, round(_SHARE * weight.size)), replace=False)
    return TensorMask.of_indices(torch.from_numpy(np.sort(chosen)), weight.size)
