"""From the engine's thread to whoever reads an answer, at most so much of it at a time."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from freemoe.serve.engine.requests import Event, SequenceEnd


class EventQueue:
    """The events of one sequence, in order; the last is a `SequenceEnd`.

    ``most`` are kept for a reader that does not read; the last one always has room.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._listener: Callable[[], object] | None = None
        self.is_closed = False

    def put_event(self, event: Event) -> bool:
        """Hand on an event; False where nobody reads any more, or there is no room for it."""
        last = isinstance(event, SequenceEnd)
        with self._lock:
            if self.is_closed or (len(self._events) >= self.most and not last):
                return False
            self._events.append(event)
            listener = self._listener
        if listener is not None:
            # The reader's loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                listener()
        return True

    def set_listener(self, listener: Callable[[], object]) -> None:
        """Have a function called, on the engine's thread, whenever there is something to `poll_events`."""
        with self._lock:
            self._listener = listener
            waiting = bool(self._events)
        if waiting:
            listener()

    def poll_events(self) -> list[Event]:
        """Take all events that wait now; never blocks."""
        with self._lock:
            found = list(self._events)
            self._events.clear()
        return found

    def close(self) -> None:
        """Read no more: the sequence's slot is freed before the engine's next step."""
        with self._lock:
            self.is_closed = True
            self._events.clear()
