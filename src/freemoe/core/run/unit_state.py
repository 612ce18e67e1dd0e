"""How far a unit of work has come: its state, kept beside the run's journal, so that a killed unit goes on in its middle.

The journal knows units as a whole. One that lasts keeps a state between two of its steps, which replaces the one before, and
which goes when the unit is finished. A state is everything that the next step depends on, bit by bit: a unit that goes on from
it ends with the same bytes. When it is kept is decided by the clock, and changes no result.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from freemoe.core.files import json_digest, make_folder, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

    State = dict[str, Tensor]

T = TypeVar("T")

SECONDS = 2.0
"""Between two states of a unit, at least: a killed run loses so many seconds and the step that it was at."""

SHARE = 0.05
"""Of a unit's time that keeping states may take: those of large models are kept less often."""

_DONE = "|done"
# Letters of the checksum that a file begins with.
_SUM = 64


class UnitState:
    """The state of one unit of work, or of a part of it.

    Nothing is kept where there is no folder.
    """

    def __init__(self, folder: Path | None, unit: str, part: str = "") -> None:
        self._folder, self._unit, self._part = folder, unit, part
        self._due = time.monotonic() + SECONDS

    def part_state(self, name: str) -> UnitState:
        """The state of a part of the unit; parts of parts have their names joined."""
        return UnitState(self._folder, self._unit, f"{self._part} {name}".strip())

    @property
    def _state_path(self) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{json_digest(self._unit)}-{json_digest(self._part)}.state"

    def read_state(self) -> State | None:
        """The last state; None where there is none, or one that is damaged: then the unit begins anew."""
        path = self._state_path
        if path is None or not path.is_file():
            return None
        blob = path.read_bytes()
        if hashlib.sha256(blob[_SUM:]).hexdigest().encode() != blob[:_SUM]:
            return None
        import torch

        return torch.load(io.BytesIO(blob[_SUM:]), weights_only=True)

    def write_state(self, state: Callable[[], State], *, now: bool = False) -> bool:
        """Keep a state, if it is time to; says whether it was.

        Raises:
            DiskError: The disk refuses; the state before this one still stands.
        """
        path, began = self._state_path, time.monotonic()
        if path is None or (not now and began < self._due):
            return False
        import torch

        make_folder(path.parent)
        buffer = io.BytesIO()
        # A view would bring all of its storage along. The order of dimensions in memory stays: products of a transposed matrix
        # have other last bits.
        torch.save({name: tensor.detach().cpu().clone() for name, tensor in state().items()}, buffer)
        blob = buffer.getvalue()
        write_atomic(path, hashlib.sha256(blob).hexdigest().encode() + blob, f"state {self._unit}")
        ended = time.monotonic()
        self._due = ended + max(SECONDS, (ended - began) / SHARE if SHARE else 0.0)
        return True

    def resume_iter(
        self,
        items: Iterable[T],
        state: Callable[[], State],
        load: Callable[[State], None],
        skipped: Callable[[int], None] | None = None,
    ) -> Iterator[T]:
        """The items of a pass that sums something up, without those that an earlier process has added already.

        The items are the same ones, in the same order, every time. ``state`` gives the sums after an item was added and the
        next one is asked for; ``skipped`` is told how many were added already, if any.
        """
        import torch

        kept, done = self.read_state(), 0
        if kept is not None:
            done = int(kept.pop(_DONE))
            load(kept)
            if skipped is not None:
                skipped(done)
        began, written = time.monotonic(), done
        for number, item in enumerate(items, 1):
            if number > done:
                yield item
                done = number
                if self.write_state(lambda number=number: {**state(), _DONE: torch.tensor(number)}):
                    written = number
        # A pass that took its time is not done again for what comes behind it.
        if done > written and time.monotonic() - began >= SECONDS:
            self.write_state(lambda: {**state(), _DONE: torch.tensor(done)}, now=True)

    def map_items(self, items: Iterable[T], work: Callable[[T], State]) -> list[State]:
        """What the work returns of every item, in their order; kept in a file for some of them after the other.

        The items are the same ones, in the same order, every time.
        """
        found: list[State] = []
        files = 0
        while (kept := self.part_state(f"file {files}").read_state()) is not None:
            files += 1
            for name, tensor in kept.items():
                number, _, own = name.partition("|")
                found.extend({} for _ in range(int(number) + 1 - len(found)))
                found[int(number)][own] = tensor
        written, began = len(found), time.monotonic()
        last = self.part_state(f"file {files}")
        for number, item in enumerate(items):
            if number >= len(found):
                found.append(work(item))
                if last.write_state(partial(_number_states, found, written)):
                    due, written, files = last._due, len(found), files + 1
                    last = self.part_state(f"file {files}")
                    last._due = due
        if len(found) > written and time.monotonic() - began >= SECONDS:
            last.write_state(partial(_number_states, found, written), now=True)
        return found


def _number_states(states: list[State], first: int) -> State:
    """States from a number on as one: ``number|name``."""
    return {f"{n}|{name}": t for n, own in enumerate(states[first:], first) for name, t in own.items()}


NO_CHECKPOINT = UnitState(None, "")
"""Where there is no run folder, nothing is kept."""


def delete_states(folder: Path, unit: str) -> None:
    """Remove the states of a unit that is finished."""
    for path in folder.glob(f"{json_digest(unit)}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
