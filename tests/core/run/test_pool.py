"""A pool whose workers take long to start, or whose cluster is gone: what it says meanwhile, and when it stops."""

import pickle
import time

import pytest

from freemoe.core.errors import WorkerError
from freemoe.core.run import pool as pools
from freemoe.core.run.pool import WorkerDied, WorkerPool
from freemoe.core.run.units import Unit, run_pickled

UNITS = [Unit(f"u{n}", "builtins:pow", {"base": n, "exp": 2}) for n in range(3)]


class Late:
    """A worker that does its units when asked for the answer, and is ready some time after it was begun."""

    def __init__(self, ready, dies):
        self.ready, self.dies = ready, dies
        self.unit = None

    def send(self, unit):
        self.unit = unit

    def receive(self):
        if self.unit is None:
            return True, {}
        if self.dies:
            raise WorkerDied("its owner's node has crashed")
        return pickle.loads(run_pickled(self.unit, "here"))

    def end(self):
        pass


class LatePool(WorkerPool):
    """Workers that are ready after so many seconds each (the last figure holds on), and die at work if the cluster is gone."""

    def __init__(self, *starts, gone=False):
        super().__init__(len(starts))
        self.starts, self.gone = list(starts), gone

    def _start(self):
        wait = self.starts.pop(0) if len(self.starts) > 1 else self.starts[0]
        return Late(time.monotonic() + wait, self.gone), False

    def _that_answer(self, workers, seconds):
        end = time.monotonic() + (10 if seconds is None else seconds)
        while True:
            ready = [w for w in workers if isinstance(w, Late) and w.ready <= time.monotonic()]
            if ready or time.monotonic() >= end:
                return ready
            time.sleep(0.005)

    def _advice(self, how):
        return "."

    def _backend_error(self):
        return WorkerError("the cluster is gone") if self.gone else None


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pools, "EVERY", 0.05)
    monkeypatch.setattr(pools, "PATIENCE", 0.3)


def test_while_workers_start_their_number_and_the_limit_are_logged(caplog):
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
def test_who_gets_no_worker_is_told_why_and_soon(start, gone, says, least, most):
    began = time.monotonic()
    with pytest.raises(WorkerError, match=says):
        list(LatePool(start, gone=gone).run(UNITS))
    assert least <= time.monotonic() - began < most


def test_of_two_that_hang_at_the_same_moment_neither_is_asked_again(monkeypatch):
    ended = []
    answer = LatePool._that_answer

    def asked(pool, workers, seconds):
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
