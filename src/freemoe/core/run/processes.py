"""Processes of this machine that do units side by side."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import Any, cast

from freemoe.core.run.pool import PoolWorker, WorkerDied, WorkerPool
from freemoe.core.run.units import Unit, run_pickled


class ProcessPool(WorkerPool):
    """Does units in several processes of this machine. A process ends with this one.

    ``threads``: CPU threads of each in torch; torch's own number if None.
    """

    def __init__(self, count: int, threads: int | None = None, limit: float | None = None) -> None:
        super().__init__(count, limit=limit)
        self.threads = threads

    def close(self) -> None:
        """Ask all processes to leave, and end those that stay after ten seconds."""
        # Asked to leave, they put away what they hold of the system (semaphores); all at a time, because that takes a moment.
        idle = cast("list[_ProcessWorker]", list(self._idle))
        for worker in idle:
            worker.pipe.close()
        for worker in idle:
            worker.process.join(10)
        super().close()

    def _start(self) -> tuple[PoolWorker, bool]:
        # What it is sent waits in the pipe until it is ready.
        return _ProcessWorker(self.threads), True

    def _that_answer(self, workers: Collection[PoolWorker], seconds: float | None) -> list[PoolWorker]:
        processes = cast("Collection[_ProcessWorker]", workers)
        ready = multiprocessing.connection.wait([p.pipe for p in processes], seconds)
        return [p for p in processes if p.pipe in ready]

    def _advice(self, how: str) -> str:
        # A positive code is of a process that just left, as one does that cannot import the script it comes from.
        script = how.startswith("it ended with") and how not in ("it ended with 0", "it ended with None")
        hint = " (a script that starts processes needs `if __name__ == '__main__':`)" if script else ""
        return f"{hint}. Most often memory ran out: every worker holds all that one process does."


class _ProcessWorker:
    """A process that does one unit at a time."""

    def __init__(self, threads: int | None) -> None:
        # Not forked: a copy of a process with threads of its own (torch's) may hang.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_worker_main, args=(theirs, threads), daemon=True)
        self.process.start()
        # Theirs alone, so that the pipe ends when they do.
        theirs.close()

    def send(self, unit: Unit) -> None:
        # One that is dead already shows when it is asked for its answer.
        with contextlib.suppress(OSError):
            self.pipe.send(unit)

    def receive(self) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.pipe.recv_bytes())
        # The pipe ends, perhaps in the middle of an answer.
        except (EOFError, OSError):
            self.process.join(10)
            code = self.process.exitcode
            self.end()
            raise WorkerDied(
                f"killed by signal {-code}" if code is not None and code < 0 else f"it ended with {code}"
            ) from None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _worker_main(pipe: Connection, threads: int | None) -> None:
    """What a worker does: units, until nobody sends any more."""
    # Ctrl-C reaches every process of a terminal; the first one knows what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    while True:
        try:
            unit: Unit = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(run_pickled(unit, "another process"))


def end_with_parent() -> None:
    """Let this process end when the one that started it does, even by a kill: nothing is done for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
