"""What is switched off, as a value: a compact mask per weight.

A mask is held as packed bits or, where few weights are off, as 16-bit places within blocks of 65,536, whichever is
smaller. Places are flat and in a weight's canonical order (experts, rows, columns), rows being outputs. As int64
indices they are made for one weight at a time, and never leave ``freemoe.models``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from freemoe.core.errors import FreeMoEError
from freemoe.kernels.waits import numbers_of
from freemoe.models.sorted_code import decode_sorted, encode_sorted

if TYPE_CHECKING:
    from freemoe.models.weights import WeightMatrix

AXES = ("rows", "columns", "experts")
"""Along which whole lines of a weight can be off."""

# What 16 bits count.
_BLOCK = 1 << 16
# Bytes of a place within a block, and of a block's end.
_PLACE, _END = 2, 8


class MaskError(FreeMoEError, ValueError):
    """Indices that are no mask, or a mask that does not fit its weight."""


@dataclass(frozen=True, eq=False)
class TensorMask:
    """Which of one weight's numbers are off."""

    size: int  # Numbers of the weight
    count: int  # Those that are off
    # ``(ceil(size / 8),)`` uint8, the first number in the highest bit; None where places are smaller
    bits: Tensor | None = None
    # ``(count,)`` int16, the 16 bits of every place within its block; None where bits are smaller
    places: Tensor | None = None
    ends: Tensor | None = None  # ``(blocks + 1,)`` int64: how many places lie before each block; None beside ``bits``

    @classmethod
    def of_indices(cls, indices: Tensor, size: int) -> TensorMask:
        """The mask of flat indices. ``indices``: ``(n,)`` int64, ascending, each once.

        Raises:
            MaskError: Indices that are of another type or shape, unsorted, repeated or out of range.
        """
        if indices.dtype != torch.int64 or indices.ndim != 1:
            raise MaskError(
                f"Indices have type {indices.dtype} and shape {tuple(indices.shape)}; (n,) torch.int64 needed."
            )
        ascending = indices[1:] > indices[:-1]
        if not bool(ascending.all()):
            at = int((~ascending).nonzero()[0])
            raise MaskError(
                f"Indices must ascend, each once: number {at} is {int(indices[at])}, the next is {int(indices[at + 1])}."
            )
        if len(indices) and ((low := int(indices[0])) < 0) | ((high := int(indices[-1])) >= size):
            raise MaskError(
                f"Indices reach from {low} to {high}, but there are {size} weights: 0 to {size - 1} allowed."
            )
        return cls._of_ascending(indices, size)

    @classmethod
    def _of_ascending(cls, indices: Tensor, size: int) -> TensorMask:
        """The same of indices that are known to be a mask: nothing is asked of them, so no host waits for a device."""
        if not _indices_are_smaller(len(indices), size):
            bools = torch.zeros(size, dtype=torch.bool, device=indices.device)
            return cls(size, len(indices), bits=_pack_bits(bools.index_fill_(0, indices, True)))
        starts = torch.arange(0, size + _BLOCK, _BLOCK, device=indices.device)
        if _on_cpu(indices):
            places = torch.from_numpy(indices.numpy().astype(np.uint16).view(np.int16))
        else:
            low = indices & (_BLOCK - 1)
            places = torch.where(low < _BLOCK // 2, low, low - _BLOCK).to(torch.int16)
        return cls(size, len(indices), places=places, ends=torch.searchsorted(indices, starts))

    @classmethod
    def empty_mask(cls, size: int, device: Any = None) -> TensorMask:
        """The mask of a weight of which all is on."""
        return cls._of_ascending(torch.empty(0, dtype=torch.int64, device=device), size)

    @classmethod
    def of_bools(cls, off: Tensor) -> TensorMask:
        """The mask of booleans of any shape, True where off."""
        return cls.of_several([off])[0]

    @classmethod
    def of_several(cls, off: Sequence[Tensor]) -> list[TensorMask]:
        """The masks of several tensors of booleans, as of one each; the host waits for a device once for all of them."""
        made = []
        for bools, count in zip(off, numbers_of([torch.count_nonzero(bools) for bools in off]), strict=True):
            flat = bools.reshape(-1)
            few = _indices_are_smaller(count, len(flat))
            made.append(
                cls._of_ascending(_flat_nonzero(flat, count), len(flat))
                if few
                else cls(len(flat), count, bits=_pack_bits(flat))
            )
        return made

    @classmethod
    def of_lines(cls, shape: tuple[int, int, int], axis: str, numbers: Tensor) -> TensorMask:
        """Whole rows, columns or experts.

        Of a weight (experts, rows, columns), ``numbers`` ``(n,)`` int64 along one of `AXES`; rows are counted over all
        experts.
        """
        experts, rows, columns = shape
        off = torch.zeros((experts * rows, columns), dtype=torch.bool)
        if axis == "columns":
            off[:, numbers] = True
        else:
            off.view(len_of(shape, axis), -1)[numbers] = True
        return cls.of_bools(off)

    @classmethod
    def decode(cls, code: Tensor, size: int) -> TensorMask:
        """Inverse of `encode_sorted`.

        Raises:
            ArtifactError: A code that is cut short.
            MaskError: A code that reaches beyond ``size``.
        """
        return cls.of_indices(decode_sorted(code), size)

    def encode(self) -> Tensor:
        """The mask in about as many bits as its entropy: ``(bytes,)`` uint8, for disks (`sorted_code`)."""
        return encode_sorted(self.indices())

    def __len__(self) -> int:
        return self.count

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors in memory."""
        return sum(t.numel() * t.element_size() for t in (self.bits, self.places, self.ends) if t is not None)

    @property
    def device(self) -> torch.device:
        """Device that its tensors lie on."""
        held = self.bits if self.bits is not None else self.places
        assert held is not None
        return held.device

    def to(self, device: Any) -> TensorMask:
        """The same mask on a device."""
        bits, places, ends = (None if t is None else t.to(device) for t in (self.bits, self.places, self.ends))
        return TensorMask(self.size, self.count, bits, places, ends)

    def indices(self, device: Any = None) -> Tensor:
        """``(count,)`` int64, ascending, on a device; its own by default. For this package's own use."""
        if self.bits is not None:
            bits = self.bits if device is None else self.bits.to(device)
            return _flat_nonzero(_unpack_bits(bits, self.size), self.count)
        assert self.places is not None
        assert self.ends is not None
        places, ends = (t if device is None else t.to(device) for t in (self.places, self.ends))
        found = places.long() & (_BLOCK - 1)
        blocks = torch.arange(0, (len(ends) - 1) * _BLOCK, _BLOCK, device=found.device)
        return found.add_(blocks.repeat_interleave(ends.diff(), output_size=self.count))

    def to_bools(self, device: Any = None) -> Tensor:
        """``(size,)`` bool, True where off."""
        if self.bits is not None:
            return _unpack_bits(self.bits if device is None else self.bits.to(device), self.size)
        where = self.indices(device)
        return torch.zeros(self.size, dtype=torch.bool, device=where.device).index_fill_(0, where, True)

    def gather_values(self, numbers: Tensor) -> Tensor:
        """``(count,)``: what stands where it is off, of a tensor with ``size`` numbers in canonical order."""
        return numbers.reshape(-1)[self.indices(numbers.device)]

    def scatter_values(self, flat: Tensor, values: Tensor) -> None:
        """Inverse of `pick`, into a flat tensor."""
        flat.index_copy_(0, self.indices(flat.device), values)

    def expand_into(self, outer: TensorMask) -> TensorMask:
        """What it says of the ``outer.count`` places of another mask, as a mask of that one's weight."""
        return TensorMask._of_ascending(outer.indices(self.device)[self.indices()], outer.size)

    def count_per_row(self, length: int) -> Tensor:
        """``(size / length,)`` int64: how many are off in every run of ``length`` numbers."""
        return torch.bincount(self.indices() // length, minlength=self.size // length)

    def __or__(self, other: TensorMask) -> TensorMask:
        return self._combine_with(other, torch.logical_or)

    def __sub__(self, other: TensorMask) -> TensorMask:
        return self._combine_with(other, torch.gt)

    def _combine_with(self, other: TensorMask, rule: Callable[[Tensor, Tensor], Tensor]) -> TensorMask:
        if other.size != self.size:
            raise MaskError(f"A mask of {self.size} numbers cannot be joined with one of {other.size}.")
        return TensorMask.of_bools(rule(self.to_bools(), other.to_bools(self.device)))

    def is_equal(self, other: TensorMask) -> bool:
        """Whether the same numbers are off, wherever the two are."""
        return self.size == other.size and torch.equal(self.indices("cpu"), other.indices("cpu"))


class Mask(Mapping[str, TensorMask]):
    """What is off in a model: name of a weight to its mask; weights that nothing is off of are absent.

    Empty ones are left out.
    """

    def __init__(self, tensors: Mapping[str, TensorMask] = MappingProxyType({})) -> None:
        self._tensors = {name: mask for name, mask in tensors.items() if mask.count}

    @classmethod
    def of_indices(cls, indices: Mapping[str, Tensor], weights: Sequence[WeightMatrix]) -> Mask:
        """The mask of flat indices per weight; see `TensorMask.of_indices`.

        Raises:
            MaskError: A weight that is not among ``weights``, or indices that are no mask of it; names the weight.
        """
        return cls._from_tensors(TensorMask.of_indices, indices, weights)

    def __getitem__(self, name: str) -> TensorMask:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Mask({self.count} off in {len(self)} weights, {self.num_bytes} bytes)"

    @property
    def count(self) -> int:
        """Single weights that are off."""
        return sum(mask.count for mask in self.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all its masks in memory."""
        return sum(mask.num_bytes for mask in self.values())

    def off_share(self, weights: Sequence[WeightMatrix]) -> float:
        """Single weights that are off as a share of all of ``weights``, 0 to 1; 0 where there are none."""
        size = sum(w.size for w in weights)
        return self.count / size if size else 0.0

    def to(self, device: Any) -> Mask:
        """The same mask on a device."""
        return Mask({name: mask.to(device) for name, mask in self.items()})

    def union(self, *others: Mask) -> Mask:
        """What is off here or in any other."""
        found = dict(self._tensors)
        for other in others:
            for name, mask in other.items():
                found[name] = found[name] | mask if name in found else mask
        return Mask(found)

    def difference(self, other: Mask) -> Mask:
        """What is off here, and not there."""
        return Mask({name: mask - other[name] if name in other else mask for name, mask in self.items()})

    def is_equal(self, other: Mask) -> bool:
        """Whether the same weights are off, wherever the two masks are."""
        return self.keys() == other.keys() and all(mask.is_equal(other[name]) for name, mask in self.items())

    def check_weights(self, weights: Sequence[WeightMatrix]) -> None:
        """Check that it fits ``weights``.

        Raises:
            MaskError: With the weight's name and the numbers.
        """
        sizes = {w.name: w.size for w in weights}
        for name, mask in self.items():
            if name not in sizes:
                raise unknown_weight(name, list(sizes))
            if mask.size != sizes[name]:
                raise MaskError(
                    f"The mask of {name} is of {mask.size} weights, but it has {sizes[name]}: it was made for another base."
                )

    def encode(self) -> dict[str, Tensor]:
        """Name to its code; see `TensorMask.encode`."""
        return {name: mask.encode() for name, mask in self.items()}

    @classmethod
    def decode(cls, codes: Mapping[str, Tensor], weights: Sequence[WeightMatrix]) -> Mask:
        """Inverse of `encode_sorted`.

        Raises:
            ArtifactError: A code that is cut short.
            MaskError: A code of an unknown weight, or that reaches beyond it.
        """
        return cls._from_tensors(TensorMask.decode, codes, weights)

    @classmethod
    def _from_tensors(
        cls, make: Callable[[Tensor, int], TensorMask], parts: Mapping[str, Tensor], weights: Sequence[WeightMatrix]
    ) -> Mask:
        sizes = {w.name: w.size for w in weights}
        found = {}
        for name, part in parts.items():
            if name not in sizes:
                raise unknown_weight(name, list(sizes))
            try:
                found[name] = make(part, sizes[name])
            except MaskError as error:
                raise MaskError(f"{name}: {error}") from None
        return cls(found)


def unknown_weight(name: str, known: Sequence[str]) -> MaskError:
    """The error for a mask of a weight that is not there."""
    return MaskError(
        f"A mask for {name!r}, which is not among the {len(known)} weights given (the first is "
        f"{next(iter(known), None)!r}). Use the sublayers and layers that the mask was made for."
    )


def len_of(shape: tuple[int, int, int], axis: str) -> int:
    """How many lines a weight (experts, rows, columns) has along one of `AXES`."""
    experts, rows, columns = shape
    return {"rows": experts * rows, "columns": columns, "experts": experts}[axis]


def _indices_are_smaller(count: int, size: int) -> bool:
    return _PLACE * count + _END * (-(-size // _BLOCK) + 1) < size / 8


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _flat_nonzero(flat: Tensor, count: int) -> Tensor:
    # numpy looks through booleans several times faster; a device that is told how many there are need not be waited for.
    return torch.from_numpy(np.flatnonzero(flat.numpy())) if _on_cpu(flat) else flat.nonzero_static(size=count)[:, 0]


def _pack_bits(flat: Tensor) -> Tensor:
    if _on_cpu(flat):
        return torch.from_numpy(np.packbits(flat.numpy()))
    eights = torch.nn.functional.pad(flat.to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
    return (eights << torch.arange(7, -1, -1, dtype=torch.uint8, device=flat.device)).sum(1, dtype=torch.uint8)


def _unpack_bits(bits: Tensor, size: int) -> Tensor:
    if _on_cpu(bits):
        return torch.from_numpy(np.unpackbits(bits.numpy(), count=size).view(np.bool_))
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).flatten()[:size].bool()
