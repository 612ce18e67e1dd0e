"""Where long work reports how far it is."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

log = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two lines of a stage."""


class Progress(Protocol):
    """Where long work reports how far it is; the command line draws bars from it."""

    def stage(self, name: str, total: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Open a stage of ``total`` steps; yields a function that takes finished steps."""
        ...

    def say(self, line: str) -> None:
        """Print a line that stays."""
        ...


class Quiet:
    """A progress that shows nothing but log lines."""

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Open a stage that draws nothing."""
        log.debug("%s: %d steps", name, total)
        yield lambda steps: None

    def say(self, line: str) -> None:
        """Log the line."""
        log.info("%s", line)


class Kept(Quiet):
    """A progress that keeps its lines, for a dry run to print what the run itself would say."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Keep the line."""
        self.lines.append(line)


@dataclass
class _Stage:
    name: str
    total: int
    began: float
    done: int = 0

    def advance(self, steps: int) -> None:
        self.done += steps

    def line(self, now: float) -> str:
        elapsed = now - self.began
        share = self.done / max(1, self.total)
        left = _clock(elapsed * (1 - share) / share) if 0 < share <= 1 else "unknown"
        return f"progress: {self.name} {self.done}/{self.total} ({100 * share:.0f} %) elapsed {_clock(elapsed)} left {left}"


class Lines:
    """A progress for logs: a line every ten seconds while a stage lasts, and one when it ends.

    Each is one line without control characters that begins with ``progress:``::

        progress: search 3/12 (25 %) elapsed 0:01:10 left 0:03:30

    Args:
        write: Takes a line.
        clock: Seconds that only grow.
        event: What a stage sets when it ends, and its lines wait for in between.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        event: Callable[[], threading.Event] = threading.Event,
    ) -> None:
        self.write, self.clock, self.event = write, clock, event

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Open a stage; its lines come from a thread, so that a long step does not silence them."""
        stage, ended = _Stage(_printable(name), total, self.clock()), self.event()

        def beat() -> None:
            while not ended.wait(EVERY):
                self.write(stage.line(self.clock()))

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield stage.advance
        finally:
            ended.set()
            thread.join()
            self.write(stage.line(self.clock()))

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self.write(line)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
