"""The key-value cache of many sequences of different lengths, each with a slot, in buffers that grow.

Shapes: S slots, B rows of a forward pass, H key-value heads, L new tokens of each row, K tokens a row sees, D size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freemoe.compat.caches import Cache, DynamicLayer

_FIRST_LENGTH = 128


@dataclass
class SlotMapping:
    """Where the next forward pass writes: row i goes to slot ``slots[i]``, behind its ``starts[i]`` tokens."""

    slots: list[int] = field(default_factory=list)  # Of every row, ascending
    starts: list[int] = field(default_factory=list)  # Tokens that each row's slot holds
    # ``(2, B)`` both, on the model's device: sent once for all layers
    places: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.int64))
    longest: tuple[int, int] = (1, 1)  # Slots and tokens there can be at most; buffers grow no further but for padding


class SlotLayer(DynamicLayer):
    """One layer's keys and values ``(S, H, room, D)``.

    All that no token was written to is zero: what is masked takes part with weight zero, and zero times NaN is NaN.
    """

    def __init__(self, aim: SlotMapping) -> None:
        super().__init__()
        self.aim = aim

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``(B, H, L, D)`` where it is aimed at; returns what the rows see, ``(B, H, K, D)``."""
        self.keys, self.values = self._write_slots(self.keys, key_states), self._write_slots(self.values, value_states)
        self.is_initialized = True
        end = max(self.aim.starts) + key_states.shape[2]
        return self._read_slots(self.keys, end), self._read_slots(self.values, end)

    def _read_slots(self, buffer: Tensor, end: int) -> Tensor:
        slots = self.aim.slots
        # Slots that follow each other are a view of the buffer.
        if slots == list(range(slots[0], slots[0] + len(slots))):
            return buffer[slots[0] : slots[0] + len(slots), :, :end]
        return buffer[:, :, :end].index_select(0, self.aim.places[0].to(buffer.device))

    def _write_slots(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        length, aim = new.shape[2], self.aim
        buffer = self._ensure_capacity(buffer, new, max(aim.slots) + 1, max(aim.starts) + length)
        if length == 1:
            slots, starts = aim.places.to(new.device)
            buffer[slots, :, starts] = new[:, :, 0]
            return buffer
        for i, (slot, start) in enumerate(zip(aim.slots, aim.starts, strict=True)):
            buffer[slot, :, start : start + length] = new[i]
        return buffer

    def _ensure_capacity(self, buffer: Tensor | None, new: Tensor, slots: int, room: int) -> Tensor:
        """The buffer, or a larger one with its content; it doubles, so that little is copied."""
        held = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
        if buffer is not None and held[0] >= slots and held[1] >= room:
            return buffer
        most_slots, most_room = self.aim.longest
        slots = max(slots, min(2 * held[0], most_slots), held[0])
        room = max(room, min(max(2 * held[1], _FIRST_LENGTH), most_room), held[1])
        larger = new.new_zeros(slots, new.shape[1], room, new.shape[3])
        if buffer is not None:
            larger[: held[0], :, : held[1]] = buffer
        return larger

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of a slot to another."""
        for buffer in (self.keys, self.values):
            # Where nothing was written yet there may be no slot either.
            if buffer is not None and length:
                buffer[target, :, :length] = buffer[source, :, :length]

    def zero_slot(self, slot: int) -> None:
        """Set a slot's keys and values to zero."""
        for buffer in (self.keys, self.values):
            if buffer is not None and slot < len(buffer):
                buffer[slot].zero_()

    def get_seq_length(self) -> int:
        """Tokens of the longest row of the next pass."""
        return max(self.aim.starts, default=0)


class SlotCache(Cache):
    """Slots that are kept without gaps: sequences have numbers, and where they stand may change between two passes.

    Attributes:
        places: Where each sequence stands, by its number.
        lengths: Tokens of each; what was written behind them is padding.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.aim = SlotMapping(longest=(slots, context))
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self.aim))  # type: ignore[arg-type]
        self.places: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def add_sequence(self, number: int) -> None:
        """Give a sequence the next slot."""
        self.places[number], self.lengths[number] = len(self.places), 0

    def remove_sequence(self, number: int) -> None:
        """Free a sequence's slot; the last one moves there."""
        gap, last = self.places.pop(number), len(self.places)
        del self.lengths[number]
        moved = next((n for n, place in self.places.items() if place == last), None)
        for layer in self.layers:
            if moved is not None:
                layer.copy_slot(last, gap, self.lengths[moved])  # type: ignore[union-attr]
            # NaN in what is masked would spread to whoever comes next.
            layer.zero_slot(last)  # type: ignore[union-attr]
        if moved is not None:
            self.places[moved] = gap

    def map_slots(self, numbers: list[int]) -> None:
        """The next pass has these sequences, in the order of their places."""
        self.aim.slots = [self.places[n] for n in numbers]
        self.aim.starts = [self.lengths[n] for n in numbers]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers of all layers."""
        layers: list[Any] = self.layers
        buffers = [b for layer in layers for b in (layer.keys, layer.values) if b is not None]
        return sum(b.numel() * b.element_size() for b in buffers)


def token_bytes(config: Any, element: int) -> int:
    """Bytes of the cache per token of a sequence, from a model's config alone.

    ``element``: bytes of a number.
    """
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        # Latent attention keeps what all heads' keys and values are made of.
        return text.num_hidden_layers * (text.kv_lora_rank + text.qk_rope_head_dim) * element
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * size * element
