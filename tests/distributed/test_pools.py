"""Pools of workers, processes and actors on Ray alike: the same results as here, whatever dies meanwhile."""

import contextlib
import os

import pytest
import torch

from freemoe.core.errors import FreeMoEError, NumericError, WorkerError
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.processes import ProcessPool
from freemoe.core.run.units import Unit
from freemoe.distributed import actor
from freemoe.distributed.executors import has_ray
from freemoe.distributed.ray_pool import RayPool
from tests.core.run.away import SerialExecutor, runs, soon
from tests.core.run.test_journal import never

needs_ray = pytest.mark.skipif(not has_ray(), reason="needs ray: pip install 'freemoe[ray]'")


pytestmark = pytest.mark.slow


def unit(name, function, module="work", **arguments):
    return Unit(name, f"tests.core.run.{module}:{function}", arguments)


def results(executor, units):
    for done, found in executor.run(units):
        yield done.name, found


def warm(pool):
    """Have both workers at work, so that what follows is not timed with their start."""
    list(pool.run([unit(f"warm {n}", "square", number=1, wait=0.5) for n in range(2)]))


@pytest.fixture(scope="module", params=[ProcessPool, pytest.param(RayPool, marks=needs_ray)])
def two(request):
    """Two workers for all tests of a kind: to start one takes seconds."""
    with request.param(count=2, threads=1) as pool:
        warm(pool)
        yield pool


def test_the_same_results_as_here(two):
    units = [unit(f"u{n}", "square", number=n) for n in range(5)]
    here, there = (dict(results(executor, units)) for executor in (SerialExecutor(), two))
    assert here.keys() == there.keys()
    for name, result in here.items():
        assert result["square"] == there[name]["square"]
        assert torch.equal(result["tensor"], there[name]["tensor"])


def test_in_the_order_in_which_they_are_finished(two):
    units = [unit("slow", "square", number=1, wait=1), *(unit(f"quick {n}", "square", number=n) for n in range(2, 4))]
    assert [u.name for u, _ in SerialExecutor().run(units[1:])] == ["quick 2", "quick 3"]
    assert [u.name for u, _ in two.run(units)] == ["quick 2", "quick 3", "slow"]


def test_workers_are_used_again_and_have_the_threads_they_were_told(two):
    units = [unit(f"u{n}", "calls", number=n) for n in range(4)]
    first = dict(results(two, units))
    pids = {pid for pid, _ in first.values()}
    assert len(pids) <= 2
    assert os.getpid() not in pids
    assert max(calls for _, calls in first.values()) >= 2
    assert [found for _, found in two.run([unit("t", "threads")])] == [1]
    # Fewer may be asked for than there are.
    two.count = 1
    try:
        assert len({pid for pid, _ in dict(results(two, units)).values()}) == 1
    finally:
        two.count = 2


def test_an_exception_comes_as_itself_and_what_others_do_is_finished(two):
    units = [
        unit("slow", "square", number=3, wait=0.5),
        unit("bad", "fails", kind="numeric"),
        unit("late", "square", number=4),
    ]
    done = []
    with pytest.raises(NumericError, match=r"^a loss is NaN\n") as caught:
        done.extend(results(two, units))
    assert [name for name, _ in done] == ["slow"]
    assert "process" in caught.value.__notes__[0]
    assert "in 'bad'" in caught.value.__notes__[0]
    assert "in fails" in caught.value.__notes__[0]
    with pytest.raises(FreeMoEError, match="'odd': Local: from far away"):
        list(two.run([unit("odd", "fails", kind="local")]))


def test_one_that_dies_once_is_done_again(two, tmp_path):
    units = [unit("dying", "dies", folder=str(tmp_path), times=1), unit("other", "square", number=2, wait=0.5)]
    if isinstance(two, RayPool):
        # What is in the object store is there for the worker that replaces a dead one, too.
        parcel = two.share(b"x" * 300_000)
        units[0] = unit("dying", "weighs", parcel=parcel, folder=str(tmp_path), times=1)
    found = dict(results(two, units))
    assert found["dying"] == (300_000 if isinstance(two, RayPool) else "alive")
    assert found["other"]["square"] == 4


def test_one_that_always_dies_is_named_and_nothing_else_is_lost(two, tmp_path):
    starts = tmp_path / "starts"
    starts.mkdir()
    output = str(tmp_path / "out")
    run = RunFolder(output, {})
    run.journal.run_unit("first", lambda: 0)
    dying = unit("dying", "writes", output=output, unit="a", dies_after=2, starts=str(starts))
    units = [dying, *(unit(f"u{n}", "square", number=n) for n in range(3))]
    done = []
    ray = isinstance(two, RayPool)
    how = r"three times \(ActorDiedError: .*machine was lost" if ray else r"twice \(killed by signal 9\)"
    with pytest.raises(WorkerError, match=rf"'dying' died {how}.*fewer --workers"):
        done.extend(results(two, units))
    assert len(list(starts.iterdir())) == (3 if ray else 2)
    # The other process goes on meanwhile; the pool is as good as new afterwards.
    assert done or ray
    assert len(list(two.run(units[1:]))) == 3
    # What it finished counts, though the run itself was killed before it could join it.
    again = RunFolder(output, {})
    assert [again.journal.run_unit(f"a/{n}", never) for n in range(2)] == [0, 1]
    assert "a/2" not in again.journal


def test_a_process_that_just_leaves_has_a_code():
    with (
        ProcessPool(1) as pool,
        pytest.raises(WorkerError, match=r"it ended with 3\) \(a script .* needs `if __name__"),
    ):
        list(pool.run([unit("gone", "leaves", "light_work", code=3)]))


@pytest.mark.parametrize("times", [1, 2])
def test_one_that_hangs_is_begun_again_by_another_once(two, tmp_path, times):
    hanging = unit("hung", "hangs", "light_work", folder=str(tmp_path), times=times)
    warm(two)
    two.limit = 3
    try:
        if times == 1:
            assert dict(results(two, [hanging])) == {"hung": "awake"}
        else:
            with pytest.raises(WorkerError, match=r"'hung' took longer than 3 seconds, twice.*--unit-seconds"):
                list(two.run([hanging]))
    finally:
        two.limit = None
    assert len(list(tmp_path.iterdir())) == times


def test_who_stops_looking_ends_what_is_begun(two, tmp_path):
    mark = tmp_path / "pid"
    with contextlib.closing(two.run([unit("long", "sleeps", mark=str(mark)), unit("u", "square", number=2)])) as run:
        next(run)
        assert soon(mark.exists)
    assert soon(lambda: not runs(int(mark.read_text())))


def test_a_machine_that_is_not_alike_says_so(tmp_path):
    there = tmp_path / "base"
    with pytest.raises(
        WorkerError, match=r"has no '/.*base'. Models, data and artefacts are not sent.*a shared folder"
    ):
        actor.require_alike([str(there)], {})
    there.mkdir()
    actor.require_alike([str(there)], {})
    with pytest.raises(WorkerError, match=r"has torch .* instead of 1\.0"):
        actor.require_alike([], {"torch": "1.0"})
