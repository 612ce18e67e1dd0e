"""Where the host waits for a device: once for many numbers, as a device that is asked for each does nothing meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Bytes of tensors that are alive at a time, about, so that the host waits once for all of them.
_TOGETHER = 1 << 28


def numbers_of(scalars: Sequence[Tensor]) -> list[Any]:
    """The values of some tensors of one number each, of one type, wherever they are: the host waits once."""
    return torch.stack([s.to(scalars[0].device) for s in scalars]).tolist() if scalars else []


def in_groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in groups that the host may wait for together; on a CPU, where it never waits, each alone."""
    group: list[Tensor] = []
    for tensor in tensors:
        group.append(tensor)
        if tensor.device.type == "cpu" or sum(t.numel() * t.element_size() for t in group) >= _TOGETHER:
            yield group
            group = []
    if group:
        yield group
