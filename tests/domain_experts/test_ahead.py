"""Builds by several processes: the same bytes as by one, and nothing lost when they are killed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from freemoe.core.errors import NumericError
from freemoe.core.run.journal import RunJournal
from freemoe.domain_experts import pipeline as build_file
from freemoe.domain_experts.ahead import ParallelBuildStages
from freemoe.domain_experts.cost.dry_run import plan_build
from freemoe.domain_experts.pipeline import build, work_ahead
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.recipes import dump
from tests.core.run.away import SerialExecutor
from tests.distributed.test_pools import needs_ray
from tests.domain_experts.conftest import task_recipe
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


class Told:
    """Progress that remembers how full every bar became."""

    def __init__(self):
        self.bars = {}

    @contextmanager
    def stage(self, name, total):
        self.bars[name] = [0, total]

        def advance(steps):
            self.bars[name][0] += steps

        yield advance

    def say(self, line):
        pass


@pytest.mark.slow
def test_two_processes_write_what_one_writes(world, alone, tmp_path, monkeypatch):
    scored = []
    score = Evaluator.score
    monkeypatch.setattr(Evaluator, "score", lambda *given: scored.append(1) or score(*given))
    told = Told()
    folder = build(recipe(world, tmp_path, workers=2), progress=told)
    first, second = same(folder, alone)
    assert first["cost"]["units_done"] == second["cost"]["units_done"]
    assert first["cost"]["units_reused"] == second["cost"]["units_reused"]
    # All of it was done by others, and every bar is full.
    assert not scored
    assert all(done == total for done, total in told.bars.values())
    assert {"signed purification", "search", "report"} <= set(told.bars)


@needs_ray
@pytest.mark.slow
def test_actors_on_ray_that_do_not_see_the_folder_write_what_one_process_writes(world, alone, tmp_path):
    folder = build(recipe(world, tmp_path, place="ray", workers=2))
    first, second = same(folder, alone)
    assert first["cost"]["units_done"] == second["cost"]["units_done"]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the first process", "a worker"])
def test_killed_while_workers_run(world, alone, tmp_path, killed):
    (tmp_path / "recipe.yaml").write_text(dump(recipe(world, tmp_path, workers=2)))
    script = tmp_path / "run.py"
    script.write_text(_BUILD)
    parts, log = tmp_path / "out.partial" / "parts", tmp_path / "log"
    with log.open("wb") as stream:
        run = subprocess.Popen([sys.executable, str(script), str(tmp_path / "recipe.yaml")], stderr=stream)
    try:
        # The search has begun.
        assert _soon(lambda: any(b"score|" in text for text in _texts(parts)) or run.poll() is not None)
        assert run.poll() is None, log.read_text()[-2000:]
        workers = {int(p.stem.rpartition("-")[2]) for p in parts.iterdir()}
        os.kill(run.pid if killed == "the first process" else max(workers), signal.SIGKILL)
        code = run.wait(300)
    finally:
        run.kill()
        run.wait()
    if killed == "a worker":
        # Another one takes its place, and nobody notices.
        assert code == 0, log.read_text()[-2000:]
        same(tmp_path / "out", alone)
        return
    assert code == -signal.SIGKILL
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


def _texts(folder):
    found = []
    for path in folder.glob("*.jsonl"):
        try:
            found.append(path.read_bytes())
        except FileNotFoundError:
            continue
    return found


def _soon(asked):
    for _ in range(3000):
        if found := asked():
            return found
        time.sleep(0.05)
    return asked()


@pytest.fixture
def here(monkeypatch):
    """Workers that are this very process: no time to start them."""
    monkeypatch.setattr(
        build_file, "ParallelBuildStages", functools.partial(ParallelBuildStages, executor=SerialExecutor())
    )
    build_file._prepared_once.cache_clear()
    yield
    build_file._prepared_once.cache_clear()


def test_units_are_fitted_ahead_too(world, tmp_path, here):
    changes = {
        "units": {"unit": "neuron", "off": [0.25], "steps": 4, "every": 2, "multiple": 1},
        "search": {"select": "argmax"},
    }
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = build(recipe(world, tmp_path / "one", **changes))
    told = Told()
    two = build(recipe(world, tmp_path / "two", workers=2, **changes), progress=told)
    assert (one / "experts.safetensors").read_bytes() == (two / "experts.safetensors").read_bytes()
    assert told.bars["structured purification"][0] == told.bars["structured purification"][1]


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
    purified = []
    fill = ParallelBuildStages.run_stage
    monkeypatch.setattr(
        ParallelBuildStages, "run_stage", lambda ahead, *given: purified.append(given[:2]) or fill(ahead, *given)
    )
    same(build(recipe(world, tmp_path, workers=2)), alone)
    # One that is left is not worth a process.
    assert purified[0] == ("purify", ["sums/all"])


@pytest.fixture
def half(world, tmp_path, monkeypatch):
    """What a worker is told of a build that stopped in its search."""
    stopped(world, tmp_path, monkeypatch, "score|sums")
    build_file._prepared_once.cache_clear()
    yield recipe(world, tmp_path).model_dump(mode="json"), str(tmp_path / "out")
    build_file._prepared_once.cache_clear()


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
    def memory(workers):
        found = plan_build(recipe(world, tmp_path, workers=workers))
        assert found["workers"] == workers
        return found["memory_bytes"], found["base_bytes"]

    one, base = memory(1)
    assert memory(3)[0] == base + 3 * one
