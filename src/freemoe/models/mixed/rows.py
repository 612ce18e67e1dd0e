"""Which rows of a module's input belong to which sequence: n rows and B sequences have equal contiguous parts.

One rule serves (B, L, H), the same flattened, a flattened batch of single tokens, and several beams or answers per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from freemoe.core.errors import DataError

Key = TypeVar("Key")


def rows_by_key(keys: Sequence[Key]) -> dict[Key, list[int]]:
    """The rows that have each key (sequences by their experts), in order of first appearance."""
    found: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, []).append(row)
    return found


class ExpertAssignment:
    """The expert of every sequence of a batch."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._sequences: dict[torch.device, dict[str, Tensor]] = {}
        self._rows: dict[tuple[int, tuple[str, ...], torch.device], Tensor] = {}
        self._lists: dict[tuple[int, tuple[str, ...]], tuple[np.ndarray, np.ndarray]] = {}

    @cached_property
    def by_expert(self) -> Mapping[str, list[int]]:
        """Expert -> numbers of the sequences that use it."""
        return rows_by_key(self.names)

    def rows_per_sequence(self, rows: int) -> int:
        """How many rows of an input with so many belong to one sequence.

        Raises:
            DataError: They do not fall into equal parts.
        """
        if rows % len(self.names):
            raise DataError(
                f"{len(self.names)} sequences have experts assigned, and a module is given {rows} rows, which do not fall into "
                "equal parts. Assign one name per sequence of the batch (or per token, where a batch is flattened)."
            )
        return rows // len(self.names)

    def rows_of_experts(self, total: int, names: tuple[str, ...], device: torch.device) -> Tensor:
        """``(n,)`` int64 on a device: the rows of some experts in an input with ``total`` of them, one's after the other's."""
        key = (total, names, device)
        if key not in self._rows:
            self._forget_many(self._rows)
            each = self.rows_per_sequence(total)
            sequences = torch.cat([self._sequences_on(device)[name] for name in names])
            self._rows[key] = (sequences[:, None] * each + torch.arange(each, device=device)).flatten()
        return self._rows[key]

    def _sequences_on(self, device: torch.device) -> dict[str, Tensor]:
        """Those of every expert, sent to a device once and together."""
        if device not in self._sequences:
            sent = torch.tensor([number for own in self.by_expert.values() for number in own]).to(device)
            self._sequences[device] = dict(
                zip(self.by_expert, sent.split([len(own) for own in self.by_expert.values()]), strict=True)
            )
        return self._sequences[device]

    def rows_and_starts(self, total: int, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The same for loops that the host runs or plans: the rows ``(n,)``, and where each expert's begin, ``(G + 1,)``, as int64."""
        key = (total, names)
        if key not in self._lists:
            self._forget_many(self._lists)
            starts = np.cumsum([0, *(len(self.by_expert[name]) * self.rows_per_sequence(total) for name in names)])
            self._lists[key] = self.rows_of_experts(total, names, torch.device("cpu")).numpy(), starts
        return self._lists[key]

    @staticmethod
    def _forget_many(cache: dict) -> None:
        # A prompt's length is seen once; one token per sequence a thousand times.
        if len(cache) >= 64:
            cache.clear()
