"""A pool whose workers take long to start, or whose cluster is gone: what it says meanwhile, and when it stops."""

from __future__ import annotations

import pickle
import time
from collections.abc import Collection
from typing import Any

import pytest

from freemoe.core.errors import WorkerError
from freemoe.core.run import pool as pools
from freemoe.core.run.pool import PoolWorker, WorkerDied, WorkerPool
from freemoe.core.run.units import Unit, run_pickled

UNITS = [Unit(f"u{n}", "builtins:pow", {"base": n, "exp": 2}) for n in range(3)]


class Late:
    """A worker that does its units when asked for the answer, and is ready some time after it was begun."""

    def __init__(self, ready: float, dies: bool) -> None:
        self.ready, self.dies = ready, dies
        self.unit: Unit | None = None

    def send(self, unit: Unit) -> None:
        self.unit = unit

    def receive(self) -> tuple[bool, Any]:
        if self.unit is None:
            return True, {}
        if self.dies:
            raise WorkerDied("its owner's node has crashed")
        return pickle.loads(run_pickled(self.unit, "here"))

    def end(self) -> None:
        pass


class LatePool(WorkerPool):
    """Workers that are ready after so many seconds each (the last figure holds on), and die at work if the cluster is gone."""

    def __init__(self, *starts: float, gone: bool = False) -> None:
        super().__init__(len(starts))
        self.starts, self.gone = list(starts), gone

    def _start(self) -> tuple[PoolWorker, bool]:
        wait = self.starts.pop(0) if len(self.starts) > 1 else self.starts[0]
        return Late(time.monotonic() + wait, self.gone), False

    def _that_answer(self, workers: Collection[PoolWorker], seconds: float | None) -> list[PoolWorker]:
        end = time.monotonic() + (10 if seconds is None else seconds)
        while True:
            ready = [w for w in workers if isinstance(w, Late) and w.ready <= time.monotonic()]
            if ready or time.monotonic() >= end:
                return ready
            time.sleep(0.005)

    def _advice(self, how: str) -> str:
        return "."

    def _backend_error(self) -> WorkerError | None:
        return WorkerError("the cluster is gone") if self.gone else None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "EVERY", 0.05)
    monkeypatch.setattr(pools, "PATIENCE", 0.3)


def test_while_workers_start_their_number_and_the_limit_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    found = {unit.name: square for unit, square in LatePool(0.2, 0.2).run(UNITS)}
    assert found == {"u0": 0, "u1": 1, "u2": 4}
    lines = [line for line in caplog.messages if line.startswith("waiting for 2 workers to start: ")]
    assert 1 <= len(lines) <= 4
    assert all(line.endswith("at most 0.3 s") for line in lines)


@pytest.mark.parametrize(
    ("start", "gone", "says", "least", "most"),
    [
        (9.0, False, r"within 0\.3 seconds.*units that were finished are kept", 0.3, 2),
        (0.0, True, "the cluster is gone", 0, 0.25),
        (9.0, True, "the cluster is gone", 0, 0.25),
    ],
)
def test_who_gets_no_worker_is_told_why_and_soon(
    start: float, gone: bool, says: str, least: float, most: float
) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError, match=says):
        list(LatePool(start, gone=gone).run(UNITS))
    assert least <= time.monotonic() - began < most


def test_of_two_that_hang_at_the_same_moment_neither_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[PoolWorker] = []
    answer = LatePool._that_answer

    def asked(pool: LatePool, workers: Collection[PoolWorker], seconds: float | None) -> list[PoolWorker]:
        assert not [worker for worker in workers if worker in ended]
        return answer(pool, workers, seconds)

    monkeypatch.setattr(Late, "send", lambda worker, unit: setattr(worker, "ready", float("inf")))
    monkeypatch.setattr(Late, "end", lambda worker: ended.append(worker))
    monkeypatch.setattr(LatePool, "_that_answer", asked)
    pool = LatePool(0.0, 0.0)
    pool.limit = 0.1
    with pytest.raises(WorkerError, match=r"'u\d' took longer than 0\.1 seconds, twice"):
        list(pool.run(UNITS[:2]))
    assert len(ended) == 4
