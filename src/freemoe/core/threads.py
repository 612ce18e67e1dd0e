"""Several threads: they take turns at what only one may use, and share work that torch does not spread by itself."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class _User:
    """A thread, and the asyncio task that runs on it now or None."""

    thread: threading.Thread
    task: Any

    @classmethod
    def current(cls) -> _User:
        asyncio = sys.modules.get("asyncio")
        try:
            task = None if asyncio is None else asyncio.current_task()
        except RuntimeError:  # no loop runs on this thread
            task = None
        return cls(threading.current_thread(), task)

    def within(self, other: _User) -> bool:
        """Whether what the other has open is open for this one; a loop that a thread starts is part of what it does."""
        return self.thread is other.thread and other.task in (None, self.task)


class Turn:
    """Who may use a model now: one thread at a time, in the order in which they asked, as often as it likes.

    A turn may end on another thread than the one that has it, as a generator's does that is collected elsewhere.

    Attributes:
        kept: What users keep beside it, by name.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._waiting: list[object] = []
        # Of every block that is open, outermost first: one thread, but maybe several tasks of it.
        self._users: list[_User] = []
        self._lost = False

    def mine(self) -> bool:
        """Whether whoever asks has the turn."""
        with self._changed:
            return bool(self._users) and _User.current().within(self._users[-1])

    @contextmanager
    def held(self, threads: Threads = "wait", given_up: threading.Event | None = None) -> Iterator[None]:
        """Have the turn inside a ``with`` block; it nests.

        Args:
            threads: Whether to wait for it.
            given_up: Once set, nobody waits here any more.

        Raises:
            BusyError: Another thread has it and ``threads`` is ``raise``; another asyncio task of this very thread has it;
                ``given_up`` was set; this process was forked while another thread had it.
        """
        user = self._take(threads, given_up)
        try:
            yield
        finally:
            self._leave(user)

    def _take(self, threads: Threads, given_up: threading.Event | None) -> _User:
        me, ticket = _User.current(), object()
        with self._changed:
            if self._lost:
                raise BusyError(
                    "This process was forked while another thread was using the model, so what it holds here may be half of one "
                    "expert and half of another. Load it anew in this process, or start processes by 'spawn'."
                )
            if self._users and me.within(self._users[-1]):
                self._users.append(me)
                return me
            if self._users and self._users[-1].thread is me.thread:
                raise BusyError(
                    "Another asyncio task of this thread uses the model across an await, so waiting for it would never end. Leave "
                    "`with moe.expert(...)` before awaiting, or name the expert in the call and run it by asyncio.to_thread."
                )
            if threads == "raise" and (self._users or self._waiting):
                raise BusyError(
                    "Another thread is using this model, and threads is 'raise'. Call it again later, or open it with "
                    "threads='wait' to wait for a turn."
                )
            self._waiting.append(ticket)
            try:
                while self._users or self._waiting[0] is not ticket:
                    if given_up is not None and given_up.is_set():
                        raise BusyError("The text was closed before the model was free to begin it.")
                    self._changed.wait(None if given_up is None else _POLL)
                self._users.append(me)
                return me
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _leave(self, user: _User) -> None:
        with self._changed:
            # Not always the last: generators end when they like.
            self._users.remove(user)
            self._changed.notify_all()

    def _forked(self) -> None:
        """In the child of a fork only the thread that forked goes on."""
        self._lost = self._lost or any(user.thread is not threading.current_thread() for user in self._users)
        self._changed, self._waiting = threading.Condition(), []


def require_threads(value: str) -> Threads:
    """The setting itself.

    Raises:
        RecipeError: It is neither ``wait`` nor ``raise``.
    """
    if value not in ("wait", "raise"):
        raise RecipeError(
            f"threads is {value!r}; allowed: wait (for a turn), raise (BusyError while another thread has it)."
        )
    return value


_TURNS: weakref.WeakKeyDictionary[Any, Turn] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


def turn_of(model: Any) -> Turn:
    """The one turn of a model, whoever asks; it goes with the model."""
    with _LOCK:
        if model not in _TURNS:
            _TURNS[model] = Turn()
        return _TURNS[model]


def _after_fork() -> None:
    global _LOCK
    _LOCK = threading.RLock()
    for turn in list(_TURNS.values()):
        turn._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
