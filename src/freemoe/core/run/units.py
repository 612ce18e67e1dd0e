"""Units of work and who does them: this process, one after the other, or several processes side by side.

A unit is a name, the path of a function and plain arguments, so that it means the same wherever it is done.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from freemoe.core.errors import FreeMoEError, WorkerError


@dataclass(frozen=True)
class Unit:
    """A unit of work.

    Attributes:
        name: What errors call it; no two units of one run share it.
        function: ``package.module:function``, at the top of its module.
        arguments: Its keyword arguments: what JSON can say. What it returns can be pickled.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]

    def work(self) -> Any:
        """Do it here and now."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(**self.arguments)


class Executor(Protocol):
    """Who does units of work."""

    def run(self, units: Sequence[Unit]) -> Generator[tuple[Unit, Any], None, None]:
        """Do the units and yield each with its result, in the order in which they are finished."""
        ...


class Serial:
    """Does units in this process, one after the other."""

    def run(self, units: Sequence[Unit]) -> Generator[tuple[Unit, Any], None, None]:
        """Do the units in their order."""
        for unit in units:
            yield unit, unit.work()


class Processes:
    """Does units in several processes, which start when they are needed and live until `close`.

    What a function keeps in its module is there for the next unit of the same process. A process ends with this one.

    Args:
        count: Most processes at a time.
        threads: CPU threads of each in torch; torch's own number if None.
    """

    def __init__(self, count: int, threads: int | None = None) -> None:
        self.count = count
        self.threads = threads
        self._idle: list[_Worker] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        # Asked to leave, they put away what they hold of the system (semaphores); all at a time, because that takes a moment.
        for worker in self._idle:
            worker.pipe.close()
        while self._idle:
            worker = self._idle.pop()
            worker.process.join(10)
            worker.end()

    def run(self, units: Sequence[Unit]) -> Generator[tuple[Unit, Any], None, None]:
        """Do the units; begun in their order, yielded as they are finished.

        A unit whose process dies is begun once more. After any other trouble nothing new is begun, what others are at is
        finished and yielded, and then the trouble is raised: work of hours is not thrown away.

        Raises:
            WorkerError: When the process of a unit died twice.
            Exception: What a unit raised.
        """
        waiting, busy, died = deque(units), dict[_Worker, Unit](), set[str]()
        trouble: Exception | None = None
        try:
            while busy or (waiting and trouble is None):
                while waiting and trouble is None and len(busy) < self.count:
                    worker = self._idle.pop() if self._idle else _Worker(self.threads)
                    busy[worker] = waiting.popleft()
                    worker.send(busy[worker])
                for worker in _that_answer(busy):
                    unit = busy[worker]
                    try:
                        good, found = worker.receive()
                    # The pipe ends, perhaps in the middle of an answer.
                    except (EOFError, OSError):
                        del busy[worker]
                        how = worker.death()
                        if unit.name not in died:
                            died.add(unit.name)
                            waiting.appendleft(unit)
                        else:
                            trouble = trouble or _dead(unit, how)
                        continue
                    self._idle.append(worker)
                    del busy[worker]
                    if good:
                        yield unit, found
                    else:
                        trouble = trouble or found
            if trouble is not None:
                raise trouble
        finally:
            for worker in busy:
                worker.end()


class _Worker:
    """A process that does one unit at a time."""

    def __init__(self, threads: int | None) -> None:
        # Not forked: a copy of a process with threads of its own (torch's) may hang.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
        self.process.start()
        # Theirs alone, so that the pipe ends when they do.
        theirs.close()

    def send(self, unit: Unit) -> None:
        # One that is dead already shows when it is asked for its answer.
        with contextlib.suppress(OSError):
            self.pipe.send(unit)

    def receive(self) -> tuple[bool, Any]:
        return pickle.loads(self.pipe.recv_bytes())

    def death(self) -> int | None:
        """How one that is dying ended: its code, or the negative number of a signal."""
        self.process.join(10)
        code = self.process.exitcode
        self.end()
        return code

    def end(self) -> None:
        """Kill it, unless it is dead."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _that_answer(workers: Mapping[_Worker, Unit]) -> list[_Worker]:
    """Wait until there is an answer or a death; those of whom there is."""
    ready = multiprocessing.connection.wait([w.pipe for w in workers])
    return [w for w in workers if w.pipe in ready]


def _dead(unit: Unit, code: int | None) -> WorkerError:
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"it ended with {code}"
    hint = "" if code is None or code <= 0 else " (a script that starts processes needs `if __name__ == '__main__':`)"
    return WorkerError(
        f"The process that did {unit.name!r} died twice ({how}){hint}. Most often memory ran out: every worker holds all that "
        "one process does. All units that were finished are kept; run the same command again with fewer --workers."
    )


def _serve(pipe: Connection, threads: int | None) -> None:
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
        try:
            # Not `pipe.send`: torch would hand tensors over as files that end with this process.
            answer = pickle.dumps((True, unit.work()))
        except Exception as error:
            answer = pickle.dumps((False, _portable(error, unit)))
        pipe.send_bytes(answer)


def _portable(error: Exception, unit: Unit) -> Exception:
    """The error with its traceback as a note, or where it cannot be pickled, one that says the same."""
    error.add_note(f"in another process, in {unit.name!r}:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return FreeMoEError(f"{unit.name!r}: {type(error).__name__}: {error}")
    return error


def end_with_parent() -> None:
    """Let this process end when the one that started it does, even by a kill: nothing is done for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
