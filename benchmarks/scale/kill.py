"""Who kills a worker of a local Ray that this process started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

_ACTOR = b"ray::Actor"
"""How a process that does a unit calls itself."""


class Killer:
    """Kills one actor among this process's descendants that is at work for ``after`` seconds, inside its ``with``; on Linux."""

    def __init__(self, after: float = 2.0) -> None:
        self.killed: list[int] = []
        self._after = after
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        seen: dict[int, float] = {}
        while not self._over.wait(0.2):
            now = time.monotonic()
            working = working_actors()
            seen = {pid: seen.get(pid, now) for pid in working}
            for pid, since in seen.items():
                if now - since >= self._after:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        self.killed.append(pid)
                    return


def working_actors() -> list[int]:
    """Actors that are at work and descend from this process."""
    parents, actors = {}, []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(status.parent.name)
            # Behind the name, which may hold anything, and the state.
            parents[pid] = int(status.read_bytes().rpartition(b")")[2].split()[1])
            if (status.parent / "cmdline").read_bytes().startswith(_ACTOR + b".do"):
                actors.append(pid)
    return [pid for pid in actors if descends(pid, parents)]


def descends(pid: int, parents: dict[int, int]) -> bool:
    """Whether a process is this one's, by the parents of all."""
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()
