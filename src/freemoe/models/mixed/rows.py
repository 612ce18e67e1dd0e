"""Which rows of a module's input belong to which sequence: n rows and B sequences have equal contiguous parts.

One rule serves (B, L, H), the same flattened, a flattened batch of single tokens, and several beams or answers per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from freemoe.core.errors import DataError


class Assignment:
    """The expert of every sequence of a batch.

    Args:
        names: ``(B,)``, at least one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._rows: dict[tuple[int, str], Tensor] = {}
        self._lists: dict[tuple[int, tuple[str, ...]], tuple[np.ndarray, np.ndarray]] = {}

    @cached_property
    def of(self) -> Mapping[str, list[int]]:
        """Expert -> its sequences."""
        found: dict[str, list[int]] = {}
        for number, name in enumerate(self.names):
            found.setdefault(name, []).append(number)
        return found

    def each(self, rows: int) -> int:
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

    def rows(self, total: int, name: str) -> Tensor:
        """``(n,)`` int64: the rows of one expert in an input with ``total`` of them."""
        key = (total, name)
        if key not in self._rows:
            self._forget_many(self._rows)
            each = self.each(total)
            starts = torch.tensor(self.of[name]) * each
            self._rows[key] = (starts[:, None] + torch.arange(each)).flatten()
        return self._rows[key]

    def lists(self, total: int, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The rows of several experts, one after the other, ``(n,)``, and where each one's begin, ``(G + 1,)``, as int64."""
        key = (total, names)
        if key not in self._lists:
            self._forget_many(self._lists)
            parts = [self.rows(total, name).numpy() for name in names]
            starts = np.cumsum([0, *(len(part) for part in parts)])
            self._lists[key] = np.concatenate(parts), starts
        return self._lists[key]

    @staticmethod
    def _forget_many(kept: dict) -> None:
        # A prompt's length is seen once; one token per sequence a thousand times.
        if len(kept) >= 256:
            kept.clear()
