"""A key-value cache whose beginning is computed once and stands before every batch.

Shapes: B rows of a batch, H key-value heads, P prefix tokens, L tokens behind it, D size of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from freemoe.compat.caches import Cache, DynamicLayer


class SharedLayer(DynamicLayer):
    """One layer's keys and values ``(B, H, room, D)``, written in place behind those that are there.

    Layers with a sliding window keep all of their tokens too: the model's mask hides what lies outside the window.

    ``room``: tokens to make room for at once, where it is known how many will come.
    """

    def __init__(self, room: int = 0) -> None:
        super().__init__()
        self.room = room
        self.seen = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``(B, H, L, D)`` behind what was seen; returns keys and values ``(B, H, seen + L, D)``."""
        rows, end = key_states.shape[0], self.seen + key_states.shape[2]
        keys, values = self._write_states(self.keys, key_states), self._write_states(self.values, value_states)
        self.keys, self.values, self.seen, self.is_initialized = keys, values, end, True
        return keys[:rows, :, :end], values[:rows, :, :end]

    def _write_states(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        """Write into the buffer, or into a larger one where ``new`` does not fit."""
        rows, heads, length, size = new.shape
        end = self.seen + length
        if buffer is None or buffer.shape[0] < rows or buffer.shape[2] < end:
            larger = new.new_empty(rows, heads, max(end, self.room), size)
            if buffer is not None:
                # A batch with more rows than the one before begins with the prefix, the same in every row.
                larger[:, :, : self.seen] = buffer[: rows if buffer.shape[0] >= rows else 1, :, : self.seen]
            buffer = larger
        buffer[:rows, :, self.seen : end] = new
        return buffer

    def get_seq_length(self) -> int:
        """Number of tokens in the cache."""
        return self.seen


class SharedCache(Cache):
    """A cache to be filled with a prefix by one row, kept by `end_prefix`, and used by many batches.

    ``room``: as `SharedLayer`'s.
    """

    def __init__(self, room: int = 0) -> None:
        super().__init__(layer_class_to_replicate=partial(SharedLayer, room))  # type: ignore[arg-type]
        self.prefix = 0

    def end_prefix(self) -> None:
        """Keep what was seen so far through every `reset_to_prefix`."""
        self.prefix = self.get_seq_length()

    def reset_to_prefix(self) -> None:
        """Forget all but the prefix; the next batch may have any number of rows."""
        for layer in self.layers:
            layer.seen = self.prefix  # type: ignore[union-attr]

    def select_rows(self, rows: Tensor) -> None:
        """Drop all rows but these ``(rows,)``."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]  # type: ignore[union-attr,index]
