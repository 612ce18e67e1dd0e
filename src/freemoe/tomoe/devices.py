"""Several processes that train one conversion together, one per device, as `accelerate launch` starts them.

Every process holds the whole base and draws its share of each step's rows; gradients are averaged before the optimiser's
step, so that all hold the same gates at all times. The first process alone keeps the run's folder and does the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class DistributedContext:
    """One of the processes that train together."""

    rank: int = 0  # Its number, from 0
    count: int = 1  # How many there are

    @classmethod
    def from_environment(cls) -> DistributedContext:
        """The processes that a launcher started, this one among them; a single one without a launcher."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=not torch.accelerator.is_available())
        return cls(state.process_index, state.num_processes)

    def all_reduce_mean(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by its mean over the processes."""
        if self.count > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
                tensor.div_(self.count)

    def wait_for_all(self) -> None:
        """Return when all have come here."""
        if self.count > 1:
            dist.barrier()

    def broadcast_number(self, number: int) -> int:
        """Send the first process's number to all; returns it."""
        if self.count == 1:
            return number
        said = [number]
        dist.broadcast_object_list(said)
        return said[0]
