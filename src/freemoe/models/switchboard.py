"""Switch between experts that were used before, in about the time in which their weights could be copied.

What an expert switches off is held once: the places, and the base's values there. Values are integers here (the
weights' bits), and switching is adding: W + values puts an expert's weights back, W - values makes them zero. Integers
add exactly, so that every bit comes back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from freemoe.core.errors import DataError
from freemoe.core.threads import on_threads
from freemoe.models.gates import exclude_experts, left_out
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.switching import bits_of, edit_mode, read_with_zeros
from freemoe.models.weights import WeightMatrix

# A block of a weight stays in the CPU's cache from putting back one expert's values to taking out the other's.
_BLOCK_BYTES = 1 << 21
# For fewer switched-off weights, threads cost more than they bring.
_WORTH_THREADS = 1 << 17
# Below this, all that is held is no burden to any machine.
_LEAST_MOST = 1 << 30


@dataclass(eq=False)
class _ExpertBlock:
    """What one expert switches off of one block of a weight; the block's bits are given as (1, length) throughout."""

    places: Tensor  # (n,) int32, ascending, from the block's start
    values: Tensor | None = None  # (n,) the base's bits there; None until they are first needed
    # Both as a sparse matrix (1, length), which torch adds fastest on the CPU; they share memory
    row: Tensor | None = None

    def drop_values(self, device: torch.device) -> None:
        """Let go of the values; they will be read on this device."""
        self.places, self.values, self.row = self.places.to(device), None, None

    def add(self, bits: Tensor, times: int) -> None:
        """Put the values back where zeros are (``times`` 1), or make zeros of them (-1)."""
        assert self.values is not None
        if bits.device.type != "cpu":
            bits[0].index_add_(0, self.places, self.values, alpha=times)
            return
        if self.row is None:
            ends = torch.tensor([0, len(self.places)], dtype=torch.int32)
            self.row = torch.sparse_csr_tensor(ends, self.places, self.values, size=bits.shape, check_invariants=False)
        # The very same tensor twice: torch would copy another view of it onto itself.
        torch.add(bits, self.row, alpha=times, out=bits)

    def restore_values(self, bits: Tensor) -> None:
        """Put the values back, whatever stands there now; nothing where they are not known."""
        if self.values is not None:
            bits[0].index_copy_(0, self.places.to(bits.device).long(), self.values.to(bits.device))


Parts = list[list[_ExpertBlock | None]]
"""Per weight one per block; None where an expert switches nothing off."""

Step = Callable[[_ExpertBlock | None, _ExpertBlock | None, Tensor], None]
"""What to do with a block: takes the parts of the expert that goes and of the one that comes, and the block's bits."""

State = list[tuple[torch.dtype, int, int]]

Held = TypeVar("Held")


class RecentExperts(Generic[Held]):
    """What is held of experts of one base; where that becomes too much, what was not used for longest goes first.

    All experts together may take ``most_bytes``: half of the weights' own bytes, or 1 GiB where that is more, if None.
    """

    def __init__(self, weights: Sequence[WeightMatrix], most_bytes: int | None) -> None:
        own = sum(w.size * w.parameter.element_size() for w in weights)
        self._most_bytes = max(_LEAST_MOST, own // 2) if most_bytes is None else most_bytes
        # What was used last stands last.
        self._experts: dict[str, Held] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._experts

    @property
    def expert_names(self) -> list[str]:
        """The experts that are held."""
        return list(self._experts)

    def _make_room(self, sizes: dict[str, int], needed: Collection[str | None]) -> None:
        """Forget experts, of these sizes in bytes, until the others fit; never one that is needed."""
        for oldest in [name for name in self._experts if name not in needed]:
            if sum(sizes.values()) <= self._most_bytes:
                return
            del self._experts[oldest], sizes[oldest]


@dataclass(frozen=True, eq=False)
class _CachedExpert:
    """What is held of one expert."""

    blocks: Parts  # What it switches off of weights in memory
    count: int  # Weights that it switches off
    routers: list[tuple[Any, Tensor]]  # Gates that leave experts out, and which
    stored: list[tuple[WeightMatrix, TensorMask]]  # What is off of weights that are not in memory


class ExpertCache(RecentExperts[_CachedExpert]):
    """Experts of one base, one or none of them switched in.

    Of every expert that it knows it holds 4 bytes and the value for each switched-off weight; the model is never copied.
    Others may edit the weights in between (`switched_off` does): that is noticed, unless they go through ``.data``, and
    values are read anew. All experts together may take ``most_bytes`` (see `RecentExperts`): the one that was not used for
    longest goes first, the one that is switched in and the one learned last never.

    Attributes:
        active_expert: The expert that is switched in; None for the base.
    """

    def __init__(self, weights: Sequence[WeightMatrix], most_bytes: int | None = None) -> None:
        self._all = list(weights)
        self._weights = [w for w in weights if w.stored is None]
        super().__init__(self._weights, most_bytes)
        self._blocks: list[list[slice]] = []
        for memory in (weight.flat_memory() for weight in self._weights):
            length = _BLOCK_BYTES // memory.element_size() if memory.device.type == "cpu" else len(memory)
            # Places within a block are int32.
            length = min(length, 2**31 - 1)
            starts = range(0, len(memory), length)
            self._blocks.append([slice(start, min(start + length, len(memory))) for start in starts])
        self._base = _CachedExpert([[None] * len(blocks) for blocks in self._blocks], 0, [], [])
        # Routers that leave experts out now, and stored weights that are read with zeros.
        self._others = ExitStack()
        self.active_expert: str | None = None
        # The experts between which a switching was broken off.
        self._broken: tuple[str | None, str | None] | None = None
        self._left: State = []
        # Lets torch say here, unheard, what it says once per process about sparse tensors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            none = torch.zeros(0, dtype=torch.int32)
            torch.sparse_csr_tensor(none.new_zeros(2), none, none, size=(1, 1), check_invariants=False)

    def held_bytes(self, name: str) -> int:
        """Memory that is held for an expert, in bytes."""
        parts = [part for blocks in self._experts[name].blocks for part in blocks if part is not None]
        tensors = [t for part in parts for t in (part.places, part.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def add_expert(self, name: str, mask: Mask) -> None:
        """Take in an expert, or another one under its name; the model is not touched.

        Raises:
            DataError: The expert of this name is switched in.
            MaskError: As for `switched_off`.
        """
        if name == self.active_expert:
            raise DataError(f"Expert {name!r} is switched in: switch to another before it is learned anew.")
        mask.check_weights(self._all)
        parts: Parts = []
        for weight, blocks in zip(self._weights, self._blocks, strict=True):
            own = mask.get(weight.name)
            if own is None:
                parts.append([None] * len(blocks))
                continue
            where = own.indices(weight.device)
            places = weight.memory_indices(where)
            if places is not where:
                # Indices ascend; in a layout of another order their places do not.
                places = places.sort().values
            cuts = torch.searchsorted(places, places.new_tensor([b.start for b in blocks] + [blocks[-1].stop])).tolist()
            parts.append(
                [
                    _ExpertBlock((places[first:end] - block.start).to(torch.int32)) if first < end else None
                    for block, first, end in zip(blocks, cuts, cuts[1:], strict=False)
                ]
            )
        stored = [(w, mask[w.name]) for w in self._all if w.stored is not None and w.name in mask]
        self.remove_expert(name)
        self._experts[name] = _CachedExpert(parts, mask.count, left_out(self._all, mask), stored)
        each = 4 + max((w.parameter.element_size() for w in self._weights), default=0)
        sizes = {known: each * own.count for known, own in self._experts.items()}
        self._make_room(sizes, (name, self.active_expert, *(self._broken or ())))

    def remove_expert(self, name: str) -> None:
        """Let go of an expert's memory.

        Raises:
            DataError: It is switched in.
        """
        if name == self.active_expert:
            raise DataError(f"Expert {name!r} is switched in: switch to another before it is forgotten.")
        self._experts.pop(name, None)

    def activate_expert(self, name: str | None) -> None:
        """Switch to an expert that was learned, or with None back to the base, bit by bit.

        After an error or an interrupt the base is switched in.

        Raises:
            DataError: The expert was never learned, or the model changed its type of numbers under an expert.
        """
        if name is not None and name not in self._experts:
            raise DataError(f"Expert {name!r} was never learned. Known: {', '.join(self._experts) or 'none'}.")
        if self._broken is not None:
            self._recover_base(*self._broken)
        if name is not None:
            self._experts[name] = self._experts.pop(name)
        if name == self.active_expert:
            return
        now = self._parameter_versions()
        untouched = now == self._left
        if not untouched:
            self._read_anew(now)

        def swap_block(out: _ExpertBlock | None, into: _ExpertBlock | None, bits: Tensor) -> None:
            if out is not None and untouched:
                out.add(bits, 1)
            elif out is not None:
                # What stands there may be anything.
                out.restore_values(bits)
                out.drop_values(bits.device)
            if into is not None:
                if into.values is None:
                    into.values = bits[0].index_select(0, into.places)
                into.add(bits, -1)

        self._broken = (self.active_expert, name)
        try:
            self._others.close()
            self._for_each_block(swap_block, self.active_expert, name)
            if name is not None:
                self._others.enter_context(exclude_experts(self._experts[name].routers))
                for weight, mask in self._experts[name].stored:
                    self._others.enter_context(read_with_zeros(weight, mask))
        except BaseException:
            self._recover_base(self.active_expert, name)
            raise
        self.active_expert, self._broken, self._left = name, None, self._parameter_versions()

    def _for_each_block(self, step: Step, old: str | None, new: str | None) -> None:
        """Do a step for every block that one of two experts touches, on several threads where that pays."""
        gone, come = (self._base if name is None else self._experts[name] for name in (old, new))

        def process_weight(number: int) -> None:
            weight = self._weights[number]
            with edit_mode(weight):
                bits = bits_of(weight)[None]
                for block, out, into in zip(
                    self._blocks[number], gone.blocks[number], come.blocks[number], strict=True
                ):
                    if out is not None or into is not None:
                        step(out, into, bits[:, block])

        numbers = range(len(self._weights))
        on_cpu = all(w.device.type == "cpu" for w in self._weights)
        if on_cpu and gone.count + come.count >= _WORTH_THREADS:
            on_threads(process_weight, numbers)
            return
        for number in numbers:
            process_weight(number)

    def _parameter_versions(self) -> State:
        """Changes when a weight is edited, moved or converted by anyone."""
        parameters = [w.parameter for w in self._weights]
        # Tensors made under inference_mode do not count their edits.
        return [(p.dtype, p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]

    def _read_anew(self, now: State) -> None:
        """Others edited the weights: only what the active expert replaced is still known."""
        changed = [w.name for w, a, b in zip(self._weights, self._left, now, strict=False) if a[0] != b[0]]
        if changed and self.active_expert is not None:
            raise DataError(
                f"The model's numbers changed their type while expert {self.active_expert!r} was switched in (the first is "
                f"{changed[0]!r}), so its weights cannot be put back. Switch to the base before converting a model."
            )
        for name, own in self._experts.items():
            for weight, blocks in zip(self._weights, own.blocks, strict=True):
                for part in blocks:
                    if part is not None and name != self.active_expert:
                        part.drop_values(weight.device)

    def _recover_base(self, old: str | None, new: str | None) -> None:
        """Make it the base again, however far a switching came: the values of both experts are the base's."""

        def restore_block(out: _ExpertBlock | None, into: _ExpertBlock | None, bits: Tensor) -> None:
            for part in (out, into):
                if part is not None:
                    part.restore_values(bits)

        self._others.close()
        self._for_each_block(restore_block, old, new)
        self.active_expert, self._broken, self._left = None, None, self._parameter_versions()
