"""Several threads: they take turns at what only one may use, and share work that torch does not spread by itself."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

import torch

from freemoe.core.errors import BusyError, RecipeError

Item = TypeVar("Item")


def on_threads(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Do the work for every item, on as many threads as torch uses.

    The first error is raised when all work that had begun is done.
    """
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))


Threads = Literal["wait", "raise"]
"""What becomes of a thread that finds a model in use: it waits for its turn, or gets an error."""

_POLL = 0.05


class _QueuePlace(weakref.ref[bytearray]):
    """Where a thread stands in the queue, and the asyncio task that ran on it or None; ends with what it refers to."""

    __slots__ = ("task", "thread")

    thread: threading.Thread
    task: Any


class _AliveToken(bytearray):
    """A byte that can be referred to weakly; it lives exactly as long as a place in the queue is needed."""


def _current_task() -> Any:
    asyncio = sys.modules.get("asyncio")
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no loop runs on this thread
        return None


class ModelLock:
    """Who may use a model now: one thread at a time, in the order in which they asked, as often as it likes.

    A turn may end on another thread than the one that has it, as a generator's does that is collected elsewhere.

    A ctrl-C can raise between any two bytecodes, so no lock is taken or given back by Python code here. The queue holds weak
    references, the first one alive has the turn, and each step on it is a single call into C. What keeps a place alive is a
    `memoryview`, whose ``with`` block is entered and left in C: the turn ends with the block, and even where the block was
    never entered the turn ends with the frames that knew of it.
    """

    def __init__(self) -> None:
        self.shared: dict[str, Any] = {}
        # The blocks that are open, innermost first, all of one thread; behind them those that wait.
        self._places: list[_QueuePlace] = []
        self._lost = False

    def _current_holder(self) -> _QueuePlace | None:
        for place in tuple(self._places):
            if place() is not None:
                return place
            with suppress(ValueError):  # another thread took it out
                self._places.remove(place)
        return None

    def is_owned(self) -> bool:
        """Whether whoever asks has the turn."""
        return self._is_open(self._current_holder(), _current_task())

    def _is_open(self, first: _QueuePlace | None, task: Any) -> bool:
        """Whether what has the turn is open for this thread and task; a loop that a thread starts is part of what it does."""
        return first is not None and first.thread is threading.current_thread() and first.task in (None, task)

    def hold_lock(
        self, threads: Threads = "wait", given_up: threading.Event | None = None
    ) -> AbstractContextManager[object]:
        """Wait for the turn, and have it until the end of a ``with`` block over what is returned; it nests.

        Nobody waits here any more once ``given_up`` is set.

        Raises:
            BusyError: Another thread has it and ``threads`` is ``raise``; another asyncio task of this very thread has it;
                ``given_up`` was set; this process was forked while another thread had it.
        """
        alive = _AliveToken(1)
        try:
            place = _QueuePlace(alive)
            place.thread, place.task = threading.current_thread(), _current_task()
            if not self._acquire_again(place):
                self._places.append(place)
                self._wait_in_queue(place, threads, given_up)
            return memoryview(alive)
        except BaseException:
            # The traceback keeps this frame, for as long as somebody keeps the error.
            del alive
            raise

    def _acquire_again(self, place: _QueuePlace) -> bool:
        """Have the turn once more; False where this thread does not have it."""
        first = self._current_holder()
        if self._lost:
            raise BusyError(
                "This process was forked while another thread was using the model, so what it holds here may be half of one "
                "expert and half of another. Load it anew in this process, or start processes by 'spawn'."
            )
        if first is None or first.thread is not place.thread:
            return False
        if not self._is_open(first, place.task):
            raise BusyError(
                "Another asyncio task of this thread uses the model across an await, so waiting for it would never end. Leave "
                "`with moe.expert(...)` before awaiting, or name the expert in the call and run it by asyncio.to_thread."
            )
        self._places.insert(0, place)
        if first() is not None:
            return True
        # The block around this one was ended by another thread in this very moment, and the next in line may be in.
        self._places.remove(place)
        return False

    def _wait_in_queue(self, place: _QueuePlace, threads: Threads, given_up: threading.Event | None) -> None:
        ended = SimpleQueue[object]()
        while (first := self._current_holder()) is not None and first.thread is not place.thread:
            if threads == "raise":
                raise BusyError(
                    "Another thread is using this model, and threads is 'raise'. Call it again later, or open it with "
                    "threads='wait' to wait for a turn."
                )
            if given_up is not None and given_up.is_set():
                raise BusyError("The text was closed before the model was free to begin it.")
            # Nothing here may keep the other's place alive: it is on the stack while it is referred to, in no variable.
            watch = weakref.ref(first() or self, ended.put)
            if watch() is not self:
                with suppress(Empty):
                    ended.get(timeout=_POLL)

    def _reset_after_fork(self) -> None:
        """In the child of a fork only the thread that forked goes on."""
        me, first = threading.current_thread(), self._current_holder()
        self._lost = self._lost or (first is not None and first.thread is not me)
        self._places = [place for place in self._places if place.thread is me]


def require_threads(value: str) -> Threads:
    """The setting, where it is ``wait`` or ``raise``."""
    if value not in ("wait", "raise"):
        raise RecipeError(
            f"threads is {value!r}; allowed: wait (for a turn), raise (BusyError while another thread has it)."
        )
    return value


_TURNS: weakref.WeakKeyDictionary[Any, ModelLock] = weakref.WeakKeyDictionary()


def model_lock_of(model: Any) -> ModelLock:
    """The one turn of a model, whoever asks; it goes with the model."""
    # A dictionary's setdefault is one step, also for two threads.
    return _TURNS.setdefault(model, ModelLock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [turn._reset_after_fork() for turn in list(_TURNS.values())])
