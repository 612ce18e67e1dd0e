"""Where long work reports how far it is."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

log = logging.getLogger(__name__)


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
