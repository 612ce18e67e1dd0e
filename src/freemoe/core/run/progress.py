"""Where long work reports how far it is."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from freemoe.core import neutral

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two lines of a stage."""

_MOST_SAMPLES = 256


class Progress(Protocol):
    """Where long work reports how far it is: what `build`, `convert`, `trim` and `evaluate` take as ``progress``."""

    def stage(self, name: str, total: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Open a stage of ``total`` steps; yields a function that takes finished steps."""
        ...

    def say(self, line: str) -> None:
        """Print a line that stays."""


class QuietProgress:
    """A progress that shows nothing but log lines."""

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Open a stage that draws nothing."""
        log.debug("%s: %d steps", name, total)
        yield lambda steps: None

    def say(self, line: str) -> None:
        """Write a line to the log only."""
        log.info("%s", line)


class BarProgress:
    """Progress bars with elapsed time and ETA, on standard error or in a notebook; standard output stays for results."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Draw one bar while the stage lasts."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            TextColumn("{task.description:22}", markup=False),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            # Rich's own column forgets steps after half a minute, and then knows nothing of longer ones.
            TextColumn("left {task.fields[pace].left}", markup=False),
        )
        with Progress(*columns, console=self.console) as bars:
            pace = StageTimer(total)
            task = bars.add_task(neutral.one_line(name), total=total, pace=pace)

            def advance_bar(steps: int) -> None:
                pace.add_steps(steps)
                bars.advance(task, steps)

            yield advance_bar

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(neutral.escape_terminal(line), style="dim", markup=False, highlight=False, soft_wrap=True)


def default_progress() -> Progress:
    """Where a function reports that is given no progress: bars on a terminal or in a notebook, the log elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
        return LineProgress(print)  # rich draws in notebooks by ipywidgets alone
    return (
        BarProgress(console)
        if console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
        else QuietProgress()
    )


class CollectingProgress(QuietProgress):
    """A progress that keeps its lines, for a dry run to print what the run itself would say."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Add a line to ``lines``."""
        self.lines.append(line)


@dataclass
class StageTimer:
    """How far a stage is, and how long the rest takes at the pace of the last half of its time.

    A run that goes on finds its finished steps within moments; they soon lie before that half and count no more. Steps may
    be as long as they like: the last finished one counts however long ago it was.
    """

    total: int  # Steps of the stage
    clock: Callable[[], float] = time.monotonic  # Seconds that only grow
    done: int = 0
    _samples: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._samples = [(self.clock(), 0)]

    def add_steps(self, steps: int) -> None:
        """Count steps as finished now; their times give the rate."""
        if not steps:
            return
        self.done += steps
        self._samples.append((self.clock(), self.done))
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[1:-1:2]

    @property
    def left(self) -> str:
        """Time until the last step, as hours, minutes and seconds; ``unknown`` as long as no more than one report came.

        The first steps of a stage compile, load and warm up.
        """
        now, first = self.clock(), self._samples[0]
        half = (first[0] + now) / 2
        since, before = next((s for s in reversed(self._samples[:-1]) if s[0] <= half), first)
        if self.done == before or self.done > self.total or (self.done < self.total and len(self._samples) < 3):
            return "unknown"
        return _format_duration((now - since) * (self.total - self.done) / (self.done - before))

    def format_line(self, name: str) -> str:
        """All of it as one line."""
        share = 100 * self.done / max(1, self.total)
        elapsed = _format_duration(self.clock() - self._samples[0][0])
        return f"progress: {name} {self.done}/{self.total} ({share:.0f} %) elapsed {elapsed} left {self.left}"


class LineProgress:
    """A progress for logs: a line every ten seconds while a stage lasts, and one when it ends.

    Each is one line without control characters that begins with ``progress:``::

        progress: search 3/12 (25 %) elapsed 0:01:10 left 0:03:30

    ``event`` is what a stage sets when it ends, and its lines wait for in between.
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
        name = "".join(c if c.isprintable() else " " for c in name)
        pace, ended = StageTimer(total, self.clock), self.event()

        def write_lines() -> None:
            while not ended.wait(EVERY):
                self.write(pace.format_line(name))

        thread = threading.Thread(target=write_lines, daemon=True)
        thread.start()
        try:
            yield pace.add_steps
        finally:
            ended.set()
            thread.join()
            self.write(pace.format_line(name))

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self.write(line)


def _format_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
