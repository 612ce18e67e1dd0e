"""Workers that do units side by side, whatever becomes of them: which unit is whose turn, and what is begun again.

What a worker is (`PoolWorker`) and where it lives is another's business: a process of this machine, or an actor of a cluster.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Collection, Generator, Sequence
from typing import Any, Protocol, Self

from freemoe.core.errors import WorkerError
from freemoe.core.run.progress import EVERY
from freemoe.core.run.units import Unit

PATIENCE = 180.0
"""Seconds after which a pool gives up that has no worker and gets none."""


class WorkerDied(Exception):
    """A worker is gone; its text says how."""


class PoolWorker(Protocol):
    """Who does one unit at a time, and says first that it is ready."""

    def send(self, unit: Unit) -> None:
        """Let it begin a unit; one that is dead already shows when it is asked for its answer."""

    def receive(self) -> tuple[bool, Any]:
        """Its answer, of a worker that has one: whether it went well, and the result or the error; a new one's is empty."""
        ...

    def end(self) -> None:
        """Kill it, unless it is dead."""


class WorkerPool(ABC):
    """Does units by several workers, which start when they are needed and live until `close`.

    What a function keeps in its module is there for the next unit of the same worker.

    A unit whose worker died is begun again ``again`` times. One that takes longer than ``limit`` seconds counts as hung: its
    worker is ended, and another one begins it again, once.
    """

    def __init__(self, count: int, again: int = 1, limit: float | None = None) -> None:
        self.count = count
        self.again = again
        self.limit = limit
        self._idle: list[PoolWorker] = []
        self._starting: dict[PoolWorker, float] = {}
        self._failed_starts = 0
        self._logged = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers that have no unit to do."""
        for worker in [*self._idle, *self._starting]:
            worker.end()
        self._idle.clear()
        self._starting.clear()

    @abstractmethod
    def _start(self) -> tuple[PoolWorker, bool]:
        """Begin a worker; also whether it may be given a unit at once, or answers when it is ready."""

    @abstractmethod
    def _that_answer(self, workers: Collection[PoolWorker], seconds: float | None) -> list[PoolWorker]:
        """Wait until there is an answer or a death, so long at most; those of whom there is."""

    @abstractmethod
    def _advice(self, how: str) -> str:
        """What may be behind a death, and what to do."""

    def _backend_error(self) -> WorkerError | None:
        """Why no worker can ever be had again, if that is so."""
        return None

    def run(self, units: Sequence[Unit]) -> Generator[tuple[Unit, Any], None, None]:
        """Do the units; begun in their order, yielded as they are finished.

        A unit whose worker dies is begun again, and so is one that takes longer than the limit. After any other trouble nothing
        new is begun, what others are at is finished and yielded, and then the trouble is raised: work of hours is not thrown away.

        Raises:
            WorkerError: When the workers of a unit died, or it took too long, too often; when there is no worker to be had.
            Exception: What a unit raised.
        """
        waiting, busy, lost = deque(units), dict[PoolWorker, tuple[Unit, float]](), Counter[tuple[str, bool]]()
        trouble: Exception | None = None
        try:
            while busy or (waiting and trouble is None):
                if trouble is None:
                    self._fill_workers(waiting, busy)
                # Until somebody must be looked after who does not answer.
                ends = [since + self.limit for _, since in busy.values()] if self.limit else []
                ends += [time.monotonic() + EVERY] if self._starting else []
                seconds = max(0.0, min(ends) - time.monotonic()) if ends else None
                for worker in self._that_answer([*busy, *self._starting], seconds):
                    if worker in self._starting:
                        failed = self._finish_start(worker)
                        trouble = trouble or failed
                        continue
                    unit, _ = busy.pop(worker)
                    try:
                        good, found = worker.receive()
                    except WorkerDied as death:
                        trouble = trouble or self._backend_error() or self._retry_unit(unit, death, waiting, lost)
                        continue
                    self._idle.append(worker)
                    if good:
                        yield unit, found
                    else:
                        trouble = trouble or found
                now, limit = time.monotonic(), self.limit or float("inf")
                for worker in [w for w, (_, since) in busy.items() if now - since >= limit]:
                    worker.end()
                    failed = self._retry_unit(busy.pop(worker)[0], None, waiting, lost)
                    trouble = trouble or failed
                trouble = trouble or self._no_workers(busy)
            if trouble is not None:
                raise trouble
        finally:
            for worker in busy:
                worker.end()

    def _fill_workers(self, waiting: deque[Unit], busy: dict[PoolWorker, tuple[Unit, float]]) -> None:
        """Give every idle worker a unit, and begin as many more workers as there is work for."""
        while len(busy) + len(self._idle) + len(self._starting) < min(self.count, len(busy) + len(waiting)):
            worker, ready = self._start()
            if ready:
                self._idle.append(worker)
            else:
                self._starting[worker] = time.monotonic()
        # The number may have been made smaller since they were started.
        while waiting and self._idle and len(busy) < self.count:
            worker, unit = self._idle.pop(), waiting.popleft()
            busy[worker] = unit, time.monotonic()
            worker.send(unit)

    def _finish_start(self, worker: PoolWorker) -> Exception | None:
        """Let a new worker, that answers for the first time, be idle; the trouble, where it cannot."""
        del self._starting[worker]
        try:
            good, found = worker.receive()
        except WorkerDied as death:
            worker.end()
            self._failed_starts += 1
            # One that falls over while others are started may have bad luck; each in turn has a reason.
            return WorkerError(f"Workers die as they start: {death}.") if self._failed_starts > 2 else None
        if not good:
            worker.end()
            return found
        self._failed_starts = 0
        self._idle.append(worker)
        return None

    def _retry_unit(
        self, unit: Unit, death: WorkerDied | None, waiting: deque[Unit], lost: Counter[tuple[str, bool]]
    ) -> Exception | None:
        """Put a unit back to the front whose worker died, or hung; the trouble, where that was done before."""
        hung = death is None
        lost[unit.name, hung] += 1
        times = lost[unit.name, hung]
        if times <= (1 if hung else self.again):
            waiting.appendleft(unit)
            return None
        if hung:
            return WorkerError(
                f"{unit.name!r} took longer than {self.limit:g} seconds, twice, each time by another worker. All units that were "
                "finished are kept; run the same command again with a larger --unit-seconds, or without one."
            )
        often = {2: "twice", 3: "three times"}.get(times, f"{times} times")
        return WorkerError(
            f"The process that did {unit.name!r} died {often} ({death}){self._advice(str(death))} All units that were finished "
            "are kept; run the same command again with fewer --workers."
        )

    def _no_workers(self, busy: dict[PoolWorker, tuple[Unit, float]]) -> Exception | None:
        """Log how long workers have been starting; the trouble of a pool without any, that has waited long enough."""
        now, alone = time.monotonic(), not busy and not self._idle
        began = min(self._starting.values(), default=now)
        if now - max(began, self._logged) >= EVERY:
            self._logged = now
            limit = f"at most {PATIENCE:g} s" if alone else "others go on meanwhile"
            logging.getLogger(__name__).warning(
                "waiting for %d workers to start: %.0f s, %s", len(self._starting), now - began, limit
            )
            if lost := self._backend_error():
                return lost
        if not alone or now - began < PATIENCE:
            return None
        return WorkerError(
            f"No worker could be started within {PATIENCE:g} seconds: no machine has room for one. All units that were finished "
            "are kept; run the same command again when there is."
        )
