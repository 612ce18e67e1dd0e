"""What experts have off, taken out of the products of their tokens: y[t, r] -= sum of W[r, c] x[t, c] over the places (r, c).

Costs what is off costs, and no copy of W is made. The loops are compiled by numba where it is installed (CPU) or by Triton
(accelerators); `reference_products` is what both are held against.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from freemoe.kernels.optional import falls_back_to, importable, triton_takes
from freemoe.kernels.rows import DTYPES, in_threads, memory_of

MOST_COLUMNS = 1 << 16
"""Places are held in 16 bits: a matrix has at most so many columns."""

TOKENS, PLACES = 16, 32
"""Sizes of a kernel's block: of tokens of one expert, of places that are looked up at once."""

_AHEAD = 32
_CPU = torch.device("cpu")
# Up to so many tokens own products are quicker than torch's and a walk through a weight that has left the core's caches;
# torch multiplies bfloat16 by instructions of its own.
_MOST_OWN = {torch.float32: 32, torch.bfloat16: 8}


@dataclass(frozen=True, eq=False)
class SparsePlaces:
    """The places of a matrix (N, K) that one expert has off, row by row."""

    low: np.ndarray  # ``(count + padding,)`` uint16: the lowest 16 bits of every flat place, ascending
    ends: np.ndarray  # ``(N + 1,)`` uint32: how many lie before each row
    copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)  # Both on accelerators, see `on`
    tables: dict[torch.device, Tensor] = field(default_factory=dict)  # Where they lie there, see `device_addresses`

    @classmethod
    def from_indices(cls, indices: Tensor, rows: int, columns: int) -> SparsePlaces:
        """From flat places. ``(count,)`` int64, ascending, in a matrix (rows, columns) of at most `MOST_COLUMNS` columns."""
        flat = indices.cpu().numpy()
        low = np.zeros(len(flat) + _AHEAD, np.uint16)
        low[: len(flat)] = flat.astype(np.uint16)
        return cls(low, np.searchsorted(flat, np.arange(rows + 1) * columns).astype(np.uint32))

    def on_device(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``low`` and ``ends`` as int16 and int32, for torch; an accelerator holds its own from the first call on."""
        if device not in self.copies:
            low, ends = torch.from_numpy(self.low.view(np.int16)), torch.from_numpy(self.ends.view(np.int32))
            if device.type == "cpu":
                return low, ends
            self.copies[device] = low.to(device), ends.to(device)
        return self.copies[device]

    def device_addresses(self, device: torch.device) -> Tensor:
        """``(2,)`` int64: where both lie on an accelerator, for its kernel."""
        if device not in self.tables:
            self.tables[device] = torch.tensor([t.data_ptr() for t in self.on_device(device)]).to(device)
        return self.tables[device]

    @property
    def count(self) -> int:
        """Number of places, over all rows."""
        return int(self.ends[-1])

    @property
    def num_bytes(self) -> int:
        """Memory that they take, on accelerators too."""
        return (self.low.nbytes + self.ends.nbytes) * (1 + len(self.copies))

    def flat_indices(self, size: int, device: torch.device = _CPU) -> Tensor:
        """``(count,)`` int64: the flat places again, of ``size`` columns, on a device that need not ask the host for them."""
        low, ends = self.on_device(device)
        starts = torch.arange(0, (len(ends) - 1) * size, size, device=device)
        starts = starts.repeat_interleave(ends.diff(), output_size=self.count)
        return low[: self.count].long().sub_(starts).bitwise_and_(MOST_COLUMNS - 1).add_(starts)


@dataclass(frozen=True, eq=False)
class SparseExperts:
    """The experts of a batch that have something off in one matrix."""

    places: tuple[SparsePlaces, ...]  # One for each
    table: np.ndarray  # ``(G, 2)`` uint64: the addresses of their numbers, for the compiled loops
    tables: dict[torch.device, Tensor] = field(
        default_factory=dict
    )  # The same for accelerators, see `device_addresses`

    @classmethod
    def from_places(cls, places: Sequence[SparsePlaces]) -> SparseExperts:
        """The experts in this order, with a table of their memory addresses."""
        table = np.array([(p.low.ctypes.data, p.ends.ctypes.data) for p in places], np.uint64)
        return cls(tuple(places), table.reshape(len(places), 2))

    def device_addresses(self, device: torch.device) -> Tensor:
        """``(G, 2)`` int64: the same for an accelerator's kernel, of what is held there."""
        if device not in self.tables:
            # From where they lie already: sending a table for every weight of a new batch would be as many waits.
            self.tables[device] = torch.stack([places.device_addresses(device) for places in self.places])
        return self.tables[device]


def loops_available(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Whether there are compiled loops for this type on this kind of device."""
    return triton_takes(dtype, device) if device != "cpu" else dtype in DTYPES and importable("numba")


def reference_products(
    x: Tensor, weight: Tensor, experts: SparseExperts, tokens: np.ndarray, starts: np.ndarray
) -> Tensor:
    """As `sparse_products`, by a masked copy of the weight for every expert."""
    y = torch.nn.functional.linear(x, weight)
    tokens_on, _ = lists_on(tokens.tobytes(), starts.tobytes(), x.device)
    for places, own in zip(experts.places, tokens_on.split(np.diff(starts).tolist()), strict=True):
        masked = weight.clone()
        masked.view(-1)[places.flat_indices(weight.shape[1], x.device)] = 0
        y[own] = torch.nn.functional.linear(x[own], masked)
    return y


def sparse_products(
    x: Tensor, weight: Tensor, experts: SparseExperts, tokens: np.ndarray, starts: np.ndarray
) -> Tensor:
    """``x @ weight.T``, in which the tokens of an expert meet zeros where it has weights off; by compiled loops.

    Args:
        x: (T, K) of a type that `loops_available` knows.
        weight: (N, K) of the same, contiguous.
        experts: G of them.
        tokens: (n,) int64: the tokens that have one of them, expert by expert.
        starts: (G + 1,) int64: where in ``tokens`` each expert's begin.

    Returns:
        (T, N) of the same type.
    """
    x = x.contiguous()
    if x.device.type != "cpu":
        return triton_products(x, weight, experts, tokens, starts)
    from freemoe.kernels.sparse.loops import LOOPS as loops

    own = len(x) <= _MOST_OWN[x.dtype]
    y = x.new_empty(len(x), len(weight)) if own else torch.nn.functional.linear(x, weight)
    values, matrix, out = memory_of(x), memory_of(weight), memory_of(y)

    def take_out_rows(begin: int, end: int) -> None:
        loops.take_out(values, tokens, starts, experts.table, matrix, own, begin, end, out)

    in_threads(take_out_rows, len(weight), weight.numel())
    return y


@falls_back_to(reference_products)
def triton_products(
    x: Tensor, weight: Tensor, experts: SparseExperts, tokens: np.ndarray, starts: np.ndarray
) -> Tensor:
    """As `sparse_products`, by a kernel for accelerators; all of one type, and contiguous."""
    from freemoe.kernels.sparse.triton_loops import take_out

    y = torch.nn.functional.linear(x, weight)
    lists = lists_on(tokens.tobytes(), starts.tobytes(), x.device)
    take_out[(len(weight), len(lists[1]))](
        x, weight, y, *lists, experts.device_addresses(x.device), *weight.shape, T=TOKENS, P=PLACES
    )
    return y


@lru_cache(maxsize=64)
def lists_on(tokens: bytes, starts: bytes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (n,) and their blocks (`blocks_of`) where a kernel reads them: step after step they are the same."""
    own = torch.from_numpy(np.frombuffer(tokens, np.int64).copy()).to(device)
    return own, blocks_of(np.frombuffer(starts, np.int64)).to(device)


def blocks_of(starts: np.ndarray, size: int = TOKENS) -> Tensor:
    """Cut every expert's tokens into blocks. ``starts``: (G + 1,) int64, where they begin.

    Returns:
        (blocks, 3) int64: expert, first token, the token after the last.
    """
    found = [
        (expert, first, min(first + size, end))
        for expert, (begin, end) in enumerate(itertools.pairwise(starts.tolist()))
        for first in range(begin, end, size)
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 3)
