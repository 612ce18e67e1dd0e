"""Units on Ray: the same results as here, whatever dies meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from freemoe.core.errors import NumericError, WorkerError
from freemoe.core.run.processes import ProcessPool
from freemoe.core.run.units import SerialExecutor
from freemoe.distributed import actor
from freemoe.distributed.executors import has_ray
from freemoe.distributed.ray_pool import RayPool
from tests.core.run.test_units import hanging, results, unit

needs_ray = pytest.mark.skipif(not has_ray(), reason="needs ray: pip install 'freemoe[ray]'")
pytestmark = needs_ray


@pytest.fixture(scope="module")
def two() -> Iterator[RayPool]:
    """Two actors of a Ray of this machine, for all tests here: to start it takes seconds."""
    with RayPool(count=2, threads=1, limit=60) as pool:
        # Both are at work before anything is timed or killed.
        list(pool.run([unit(f"warm {n}", "square", number=1, wait=0.5) for n in range(2)]))
        yield pool


def test_the_same_results_as_here_and_in_processes(two: RayPool) -> None:
    units = [unit(f"u{n}", "square", number=n) for n in range(5)]
    with ProcessPool(2, 1) as processes:
        here, there, far = (dict(results(executor, units)) for executor in (SerialExecutor(), processes, two))
    assert here.keys() == there.keys() == far.keys()
    for name, result in here.items():
        assert result["square"] == there[name]["square"] == far[name]["square"]
        assert torch.equal(result["tensor"], far[name]["tensor"])


def test_an_actor_is_used_again_and_has_the_threads_it_was_told(two: RayPool) -> None:
    first = dict(results(two, [unit(f"u{n}", "calls", number=n) for n in range(4)]))
    pids = {pid for pid, _ in first.values()}
    assert len(pids) <= 2
    assert max(calls for _, calls in first.values()) >= 2
    assert [found for _, found in two.run([unit("t", "threads")])] == [1]


def test_an_exception_comes_as_itself_and_what_others_do_is_finished(two: RayPool) -> None:
    units = [unit("slow", "square", number=3, wait=0.5), unit("bad", "fails", kind="numeric")]
    done: list[tuple[str, Any]] = []
    with pytest.raises(NumericError, match="a loss is NaN") as caught:
        done.extend(results(two, [*units, unit("late", "square", number=4)]))
    assert [name for name, _ in done] == ["slow"]
    assert "in process" in caught.value.__notes__[0]
    assert "in 'bad'" in caught.value.__notes__[0]


def test_what_is_put_into_the_object_store_is_there_for_a_worker_that_replaces_a_dead_one(
    two: RayPool, tmp_path: Path
) -> None:
    parcel = two.share(b"x" * 300_000)
    arguments = {"parcel": parcel, "folder": str(tmp_path), "times": 1}
    # Dies once; another actor does it, and fetches the bytes anew.
    found = dict(results(two, [unit("dying", "weighs", **arguments), unit("other", "square", number=2)]))
    assert found["dying"] == 300_000
    assert found["other"]["square"] == 4


def test_one_that_always_dies_is_named(two: RayPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"'dying' died three times \(ActorDiedError: .*machine was lost"):
        list(two.run([unit("dying", "dies", folder=str(tmp_path), times=9)]))
    assert len(list(tmp_path.iterdir())) == 3


def test_one_that_hangs_is_begun_again_by_another(two: RayPool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(two, "limit", 2.0)
    began = time.monotonic()
    found = dict(results(two, [hanging(tmp_path, 1), unit("u", "square", number=3)]))
    assert found["hung"] == "awake"
    assert found["u"]["square"] == 9
    # It would have slept for ten minutes.
    assert 2 < time.monotonic() - began < 500


def test_a_machine_without_the_files_says_so(tmp_path: Path) -> None:
    there = tmp_path / "base"
    with pytest.raises(WorkerError, match=r"has no '/.*base'. Models, data and artefacts are not sent") as caught:
        actor.require_alike([str(there)], {})
    assert "a shared folder" in str(caught.value)
    there.mkdir()
    actor.require_alike([str(there)], {})


def test_a_machine_with_other_versions_says_so() -> None:
    with pytest.raises(WorkerError, match=r"has torch .* instead of 1\.0"):
        actor.require_alike([], {"torch": "1.0"})
