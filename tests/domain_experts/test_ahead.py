"""Builds by several workers: the same bytes as by one, and nothing lost when they are killed."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from freemoe.core.errors import NumericError
from freemoe.core.run.journal import RunJournal
from freemoe.distributed import executors, ray_pool
from freemoe.domain_experts import pipeline as build_file
from freemoe.domain_experts.ahead import ParallelBuildStages
from freemoe.domain_experts.cost.dry_run import plan_build
from freemoe.domain_experts.pipeline import build, work_ahead
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.recipes import dump
from tests.core.run.away import SerialAway, SerialExecutor, soon
from tests.distributed.test_pools import needs_ray
from tests.domain_experts.conftest import Told, task_recipe
from tests.domain_experts.test_build_resume import same

# Three subdomains of two domains.
OPTIONS = {
    "threads": 1,
    "bands": {"step": 0.5, "ratio": 0.5},
    "search": {"metrics": ["saliency", "wanda"], "method": "exhaustive", "select": "argmax"},
}


def recipe(world, folder, **changes):
    return task_recipe(world, folder / "out", **{**OPTIONS, **changes})


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    """What one process makes."""
    return build(recipe(world, tmp_path_factory.mktemp("alone")))


@pytest.fixture
def here(monkeypatch):
    """Workers that are this very process: no time to start them. Those on Ray do not see the run's folder."""
    monkeypatch.setattr(executors, "ProcessPool", lambda *asked: SerialExecutor())
    monkeypatch.setattr(ray_pool, "RayPool", SerialAway)


@pytest.fixture(autouse=True)
def unprepared():
    build_file._prepared_once.cache_clear()
    yield
    build_file._prepared_once.cache_clear()


@pytest.mark.parametrize("place", ["local", pytest.param("ray", marks=needs_ray)])
def test_two_workers_write_what_one_process_writes(world, alone, tmp_path, monkeypatch, here, place):
    elsewhere, scored, told = [], [], Told()
    score, work = Evaluator.score, build_file.work_ahead

    def working(*given, **more):
        elsewhere.append(1)
        work(*given, **more)
        elsewhere.pop()

    monkeypatch.setattr(build_file, "work_ahead", working)
    monkeypatch.setattr(Evaluator, "score", lambda *given: scored.append(bool(elsewhere)) or score(*given))
    folder = build(recipe(world, tmp_path, place=place, workers=2), progress=told)
    first, second = (result["cost"] for result in same(folder, alone))
    assert (first["units_done"], first["units_reused"]) == (second["units_done"], second["units_reused"])
    # All of it was done by workers, and every bar is full.
    assert set(scored) == {True}
    assert all(done == total for done, total in told.stages.values())
    assert {"signed purification", "search", "report"} <= set(told.stages)


@pytest.mark.slow
def test_killed_while_workers_run(world, alone, tmp_path):
    """A worker first, and then the first process, while another worker takes the place of the one that is gone."""
    (tmp_path / "recipe.yaml").write_text(dump(recipe(world, tmp_path, workers=2)))
    script = tmp_path / "run.py"
    script.write_text(_BUILD)
    parts, log = tmp_path / "out.partial" / "parts", tmp_path / "log"
    with log.open("wb") as stream:
        run = subprocess.Popen([sys.executable, str(script), str(tmp_path / "recipe.yaml")], stderr=stream)
    try:
        # The search has begun.
        assert soon(lambda: any(b"score|" in text for text in _texts(parts)) or run.poll() is not None)
        assert run.poll() is None, log.read_text()[-2000:]
        workers = _workers(parts)
        os.kill(max(workers), signal.SIGKILL)
        assert soon(lambda: _workers(parts) - workers or run.poll() is not None)
    finally:
        run.kill()
        code = run.wait()
    if code == 0:
        # The other one had finished all that was left.
        same(tmp_path / "out", alone)
        return
    assert code == -signal.SIGKILL, log.read_text()[-2000:]
    assert not (tmp_path / "out").exists()
    kept = sum(text.count(b"\n") for text in _texts(parts))
    kept += len(RunJournal(tmp_path / "out.partial" / "journal.jsonl")._values)
    # With another number of workers: what the killed ones had finished is not done again.
    first, second = same(build(recipe(world, tmp_path)), alone)
    assert first["cost"]["units_done"] <= second["cost"]["units_done"]
    assert kept > 5


_BUILD = """
import sys
from freemoe.domain_experts.pipeline import build
from freemoe.recipes import load_recipe

if __name__ == "__main__":
    build(load_recipe(sys.argv[1]))
"""


def _workers(folder):
    """The processes that have left parts of the run."""
    return {int(path.stem.rpartition("-")[2]) for path in folder.glob("*.jsonl")}


def _texts(folder):
    found = []
    for path in folder.glob("*.jsonl"):
        with suppress(FileNotFoundError):
            found.append(path.read_bytes())
    return found


def test_units_are_fitted_ahead_too(world, tmp_path, here):
    changes = {
        "domains": {"law": [str(world.law)]},
        "subdomains": {"count": 2, "min_size": 4},
        "units": {"unit": "neuron", "off": [0.25], "steps": 2, "every": 1, "multiple": 1},
        "search": {"select": "argmax"},
        "evidence": {"controls": 0, "oracle": False},
    }
    one = build(recipe(world, tmp_path / "one", **changes))
    told = Told()
    two = build(recipe(world, tmp_path / "two", workers=2, **changes), progress=told)
    assert (one / "experts.safetensors").read_bytes() == (two / "experts.safetensors").read_bytes()
    done, total = told.stages["structured purification"]
    assert done == total


def stopped(world, folder, monkeypatch, name):
    """A build that stops when it comes to a unit of work."""
    unit = RunJournal.run_unit

    def stopping(journal, asked, work):
        if asked.startswith(name) and asked not in journal:
            raise KeyboardInterrupt
        return unit(journal, asked, work)

    with monkeypatch.context() as patch:
        patch.setattr(RunJournal, "run_unit", stopping)
        with pytest.raises(KeyboardInterrupt):
            build(recipe(world, folder))


def test_a_run_of_one_process_goes_on_with_two(world, alone, tmp_path, here, monkeypatch):
    stopped(world, tmp_path, monkeypatch, "purify|sums")
    filled, fill = [], ParallelBuildStages.run_stage
    monkeypatch.setattr(
        ParallelBuildStages, "run_stage", lambda ahead, *given: filled.append(given[:2]) or fill(ahead, *given)
    )
    same(build(recipe(world, tmp_path, workers=2)), alone)
    # One that is left is not worth a process.
    assert filled[0] == ("purify", ["sums/all"])


@pytest.fixture
def half(world, tmp_path, monkeypatch):
    """What a worker is told of a build that stopped in its search."""
    stopped(world, tmp_path, monkeypatch, "score|sums")
    return recipe(world, tmp_path).model_dump(mode="json"), str(tmp_path / "out")


def test_a_worker_that_finds_something_else_says_so(half):
    with pytest.raises(NumericError, match=r"found another division into subdomains.*--workers 1"):
        work_ahead(*half, "no such hash", "search", "law/0")


def test_the_reported_split_stays_closed_until_the_choice_is_written(half, monkeypatch):
    data, output = half
    asked = []
    monkeypatch.setattr(build_file, "reported_evidence", lambda *given: asked.append(given))
    division = build_file._prepared_once(json.dumps(data), output).division_hash()
    with pytest.raises(NumericError, match=r"found another experts.safetensors"):
        work_ahead(data, output, division, "report", "law")
    assert not asked


def test_a_plan_counts_every_workers_memory(world, tmp_path):
    one, three = (plan_build(recipe(world, tmp_path, workers=workers)) for workers in (1, 3))
    assert (one["workers"], three["workers"]) == (1, 3)
    assert three["memory_bytes"] == one["base_bytes"] + 3 * one["memory_bytes"]
