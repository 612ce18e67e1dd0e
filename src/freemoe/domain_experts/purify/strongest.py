"""The largest scores of many tensors together, exactly, with one tensor's scores in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freemoe.kernels.waits import in_groups
from freemoe.models.mask import TensorMask

# As many intervals as the upper 16 bits of an fp32 number tell apart.
# Of so few scores torch finds the largest in less time than it takes to count intervals; it takes 16 bytes for each.
_SMALL = 1 << 18
_INTERVALS = 1 << 16
# Scores that are sorted into intervals at a time: on the way each takes many times its own memory.
_PART = 1 << 20
# A hint that lets so many times as many scores through as are wanted is not worth their memory.
_MOST = 8


class TopKMasks(NamedTuple):
    """What was picked of several tensors' scores."""

    masks: list[TensorMask]  # For every tensor, over its scores, which were
    line: float  # The least score that was picked: a hint where to look the next time; infinite where none was


class _TensorScores(NamedTuple):
    """Some of one tensor's scores, and where they stand."""

    at: TensorMask
    values: Tensor


def global_topk(
    scores: Sequence[Callable[[], Tensor]], count: int, above: float = 0.0, hint: float = math.inf
) -> TopKMasks:
    """The ``count`` largest scores above a line over all tensors together.

    A first look counts how many scores lie in each of 65,536 intervals, a second one takes those that may get in. One look is
    enough where a hint leaves enough of them, and not many too many: the result is the same with any hint.

    ``scores`` make the flat fp32 scores of each tensor, twice the same; equal ones go to the earlier tensor and place. About
    ``count`` are larger than a hint, or some more.
    """
    if count < 1 or not scores:
        return TopKMasks(
            [TensorMask.empty_mask(flat.numel(), flat.device) for flat in (make() for make in scores)], math.inf
        )
    found = _scores_above(scores, hint, _MOST * count) if above < hint < math.inf else None
    if found is None or sum(f.at.count for f in found) < count:
        found = _scores_above(scores, _topk_threshold(scores, count, above), None) or []
    return _select_topk(found, count)


def _scores_above(scores: Sequence[Callable[[], Tensor]], line: float, most: int | None) -> list[_TensorScores] | None:
    """All scores above a line; None where that are more than ``most``."""
    found, number = [], 0
    for group in in_groups(make() for make in scores):
        masks = TensorMask.of_several([flat > line for flat in group])
        number += sum(at.count for at in masks)
        if most is not None and number > most:
            return None
        found += [_TensorScores(at, at.gather_values(flat)) for at, flat in zip(masks, group, strict=True)]
    return found


def _topk_threshold(scores: Sequence[Callable[[], Tensor]], count: int, above: float) -> float:
    """A line, ``above`` or higher, that at least ``count`` scores are larger than, or all that are larger than ``above``."""
    if len(scores) == 1 and (flat := scores[0]()).numel() <= _SMALL:
        if count >= flat.numel():
            return above
        last = flat.float().topk(count).values[-1]
        return max(above, float(torch.nextafter(last, torch.full_like(last, -math.inf))))
    counts = torch.zeros((), dtype=torch.long)
    for make in scores:
        flat = make()
        here, one = flat.new_zeros(_INTERVALS, dtype=torch.long), flat.new_ones((), dtype=torch.long)
        for part in flat.split(_PART):
            here.index_add_(0, _interval_index(part), one.expand(len(part)))
        counts = here + counts.to(here.device)
    # How many scores lie in each interval or above it; above the one of `above` all are larger than that.
    reached, lowest = counts.flip(0).cumsum(0).flip(0).cpu(), int(_interval_index(torch.tensor([above]))) + 1
    enough = (reached[lowest:] >= count).nonzero()
    if not len(enough):
        return above
    # The end of the interval below the one in which the last one gets in.
    return max(above, _upper_end(lowest + int(enough[-1]) - 1))


def _select_topk(parts: Sequence[_TensorScores], count: int) -> TopKMasks:
    """The ``count`` largest of what was found."""
    together = torch.cat([f.values.to(parts[0].values.device) for f in parts])
    if len(together) <= count:
        return TopKMasks([f.at for f in parts], float(together.min()) if len(together) else math.inf)
    line = together.kthvalue(len(together) - count + 1).values
    chosen, equal = together > line, together == line
    # Of several scores equal to the last one that gets in, the first places do.
    chosen |= equal & (equal.cumsum(0, dtype=torch.int32) <= count - chosen.sum())
    own = TensorMask.of_several(chosen.split([f.at.count for f in parts]))
    return TopKMasks([kept.to(f.at.device).expand_into(f.at) for f, kept in zip(parts, own, strict=True)], float(line))


def _interval_index(values: Tensor) -> Tensor:
    """Number of the interval of fp32 values, by their upper 16 bits: a larger value is never in a lower one; int64."""
    bits = values.float().contiguous().view(torch.int32)
    # Bits of negative numbers count the other way round.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered >> 16).long() + _INTERVALS // 2


def _upper_end(interval: int) -> float:
    """The largest value of an interval; minus infinity below all of them."""
    if interval < 0:
        return -math.inf
    ordered = torch.tensor((((interval - _INTERVALS // 2) << 16) | 0xFFFF), dtype=torch.int64).to(torch.int32)
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    value = float(bits.view(torch.float32))
    if math.isnan(value):
        return -math.inf
    # Zero is not larger than minus zero, though it lies in a higher interval.
    return value or -torch.finfo(torch.float32).tiny
