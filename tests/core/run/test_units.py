"""Units of work: the same results in this process and in others, whatever dies meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from freemoe.core.errors import FreeMoEError, NumericError, WorkerError
from freemoe.core.run.folder import RunFolder, RunPart
from freemoe.core.run.processes import ProcessPool
from freemoe.core.run.units import SerialExecutor, Unit, UnitExecutor
from tests.core.run.test_journal import never
from tests.core.run.work import writes

WORK = "tests.core.run.work"


def unit(name: str, function: str, **arguments: Any) -> Unit:
    return Unit(name, f"{WORK}:{function}", arguments)


def results(executor: UnitExecutor, units: list[Unit]) -> Iterator[tuple[str, Any]]:
    for done, found in executor.run(units):
        yield done.name, found


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessPool]:
    """Two processes for all tests here: to start one takes seconds."""
    with ProcessPool(2, 1) as processes:
        yield processes


def test_both_executors_do_the_same(two: ProcessPool) -> None:
    units = [unit(f"u{n}", "square", number=n) for n in range(5)]
    here, there = (dict(results(executor, units)) for executor in (SerialExecutor(), two))
    assert here.keys() == there.keys()
    for name, result in here.items():
        assert result["square"] == there[name]["square"]
        assert torch.equal(result["tensor"], there[name]["tensor"])


def test_in_the_order_in_which_they_are_finished(two: ProcessPool) -> None:
    units = [unit("slow", "square", number=1, wait=2), *(unit(f"quick {n}", "square", number=n) for n in range(2, 4))]
    assert [u.name for u, _ in SerialExecutor().run(units[1:])] == ["quick 2", "quick 3"]
    assert [u.name for u, _ in two.run(units)] == ["quick 2", "quick 3", "slow"]


def test_fewer_than_there_are_workers_may_be_asked_for(two: ProcessPool) -> None:
    units = [unit(f"u{n}", "calls", number=n) for n in range(4)]
    list(two.run(units))
    two.count = 1
    try:
        assert len({found[0] for _, found in two.run(units)}) == 1
    finally:
        two.count = 2


def test_a_process_is_used_again_and_has_the_threads_it_was_told(two: ProcessPool) -> None:
    first, second = (dict(results(two, [unit("u", "calls", number=n)]))["u"] for n in range(2))
    assert first[0] == second[0] != os.getpid()
    assert second[1] == first[1] + 1
    assert [found for _, found in two.run([unit("t", "threads")])] == [1]


def test_an_exception_comes_as_itself_and_what_others_do_is_finished(two: ProcessPool) -> None:
    units = [
        unit("slow", "square", number=3, wait=0.5),
        unit("bad", "fails", kind="numeric"),
        unit("late", "square", number=4),
    ]
    done: list[tuple[str, Any]] = []
    with pytest.raises(NumericError, match=r"^a loss is NaN\n") as caught:
        done.extend(results(two, units))
    assert [name for name, _ in done] == ["slow"]
    assert "in another process, in 'bad'" in caught.value.__notes__[0]
    assert "in fails" in caught.value.__notes__[0]
    with pytest.raises(FreeMoEError, match="'odd': Local: from far away"):
        list(two.run([unit("odd", "fails", kind="local")]))


def test_one_that_dies_once_is_done_again(two: ProcessPool, tmp_path: Path) -> None:
    units = [unit("dying", "dies", folder=str(tmp_path), times=1), unit("other", "square", number=2, wait=0.5)]
    found = dict(results(two, units))
    assert found["dying"] == "alive"
    assert found["other"]["square"] == 4


def test_one_that_dies_twice_is_named_and_nothing_else_is_lost(two: ProcessPool, tmp_path: Path) -> None:
    units = [
        unit("dying", "dies", folder=str(tmp_path), times=5),
        *(unit(f"u{n}", "square", number=n) for n in range(3)),
    ]
    done: list[tuple[str, Any]] = []
    with pytest.raises(WorkerError, match=r"'dying' died twice \(killed by signal 9\).*fewer --workers"):
        done.extend(results(two, units))
    assert len(list(tmp_path.iterdir())) == 2
    # The other process goes on meanwhile; the pool is as good as new afterwards.
    assert done
    assert len(list(two.run(units[1:]))) == 3


def test_a_process_that_just_leaves_has_a_code(two: ProcessPool) -> None:
    with pytest.raises(WorkerError, match=r"it ended with 3\) \(a script .* needs `if __name__"):
        list(two.run([unit("gone", "leaves", code=3)]))


def hanging(folder: Path, times: int) -> Unit:
    return Unit("hung", "tests.core.run.light_work:hangs", {"folder": str(folder), "times": times})


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_hangs_is_begun_again_by_another_once(tmp_path: Path, times: int) -> None:
    with ProcessPool(1, limit=3) as pool:
        if times == 1:
            assert dict(results(pool, [hanging(tmp_path, 1)])) == {"hung": "awake"}
        else:
            with pytest.raises(WorkerError, match=r"'hung' took longer than 3 seconds, twice.*--unit-seconds"):
                list(pool.run([hanging(tmp_path, 2)]))
    assert len(list(tmp_path.iterdir())) == times


def test_who_stops_looking_ends_what_is_begun(two: ProcessPool, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    with contextlib.closing(two.run([unit("long", "sleeps", mark=str(mark)), unit("u", "square", number=2)])) as run:
        next(run)
        assert _soon(mark.exists)
    assert _soon(lambda: not _runs(int(mark.read_text())))


def _runs(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def _soon(asked: Callable[[], Any]) -> Any:
    for _ in range(300):
        if found := asked():
            return found
        time.sleep(0.1)
    return asked()


# ------------------------------------------------------------------ parts of a run


def test_parts_of_a_run_are_joined_in_the_order_of_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "out", {})
    run.journal.run_unit("first", lambda: 0)
    for name in ("b", "a"):
        writes(str(tmp_path / "out"), name)
    assert "a/0" not in run.journal
    for name in ("a", "b"):
        run.merge_parts(name)
    names = [f"{unit}/{what}" for unit in "ab" for what in (0, 1, 2, "tensor")]
    assert list(run.journal._values) == ["first", *names]
    assert torch.equal(run.run_tensor_unit("b/tensor", never)["a"], torch.ones(2))
    # Done once, and by this run.
    assert (run.journal.done, run.journal.reused) == (9, 0)
    assert not list((tmp_path / "out.partial" / "parts").iterdir())
    run.publish_folder()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_part_sees_what_is_finished_and_writes_nothing_of_it_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "out", {})
    run.journal.run_unit("first", lambda: 7)
    run.run_tensor_unit("t", lambda: {"a": torch.ones(3)})
    with run.journal.path.open("ab") as stream:
        stream.write(b'{"unit": "half')
    before = run.journal.path.read_bytes()
    part = RunPart(tmp_path / "out", "u")
    assert part.journal.run_unit("first", never) == 7
    assert torch.equal(part.run_tensor_unit("t", never)["a"], torch.ones(3))
    part.delete_tensors("t")
    assert run.journal.path.read_bytes() == before
    assert run.has_tensors("t")
    assert not part.journal.path.exists()


@pytest.mark.parametrize("joined", [False, True])
def test_what_a_killed_process_finished_counts(two: ProcessPool, tmp_path: Path, joined: bool) -> None:
    run = RunFolder(tmp_path / "out", {})
    run.journal.run_unit("first", lambda: 0)
    arguments = {"output": str(tmp_path / "out"), "unit": "a", "dies_after": 2}
    with pytest.raises(WorkerError, match="'a' died twice"):
        list(two.run([unit("a", "writes", **arguments)]))
    if joined:
        run.merge_parts()
    # Whether or not the run itself was killed before it could join them.
    again = RunFolder(tmp_path / "out", {})
    assert [again.journal.run_unit(f"a/{n}", never) for n in range(2)] == [0, 1]
    assert "a/2" not in again.journal
