"""What is run, what is not run again, and what a run leaves behind."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save

from benchmarks.harness import Settings
from benchmarks.real_llm import plan as planned
from benchmarks.real_llm import running
from benchmarks.real_llm.cells import ALL, Cell
from benchmarks.real_llm.data import MATERIALS, load_parts
from benchmarks.real_llm.figures.text_and_tasks import figures_of
from benchmarks.real_llm.methods import routing
from benchmarks.real_llm.methods.weights import METHODS, Stand, joined, per_document, with_adapter
from benchmarks.real_llm.protocol import quick_protocol
from freemoe.core.errors import DataError, NumericError
from freemoe.core.files import write_atomic
from freemoe.core.run.places import ExecutorSpec
from freemoe.domain_experts.route.router import DomainRouter
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.sorted_code import encode_sorted
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.benchmarks.real_llm.records import text_record
from tests.core.run.away import SerialAway, runs, soon
from tests.masks import indices_of
from tests.rows import write_rows

LORA = Cell("text", "wikitext", "lora", rank=1, rate=5e-3)
PLAN = [Cell("text", "wikitext"), Cell("text", "wikitext", "learned", 0.01), Cell("text", "wikitext", "greedy", 0.01)]


class Killed(BaseException):
    """What a kill looks like from inside."""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A plan of three cells on a model and data that are files with a few letters."""
    for name in ("wikitext2_train_5k.txt", "wiki.test.raw"):
        write_rows(tmp_path / "wikitext-2-raw" / name, ["text"])
    write_rows(tmp_path / "model" / "config.json", [{}])
    monkeypatch.setattr(running, "cells", lambda quick: PLAN)
    return Settings(True, data_root=tmp_path, model=str(tmp_path / "model"), cells=tmp_path / "cells")


def stand_on(cell, settings, protocol):
    """What a cell stands on: the settings' base, and the parts of the cell's material."""
    base, tokenizer = load_base(settings.model, dtype="float32", device="cpu")
    data = load_parts(cell.material, settings.data_root, tokenizer, protocol, 0)
    return Stand(cell, protocol, base, tokenizer, find_weights(base), data)


@pytest.fixture
def faults():
    """Methods, and what their cells raise."""
    return {}


@pytest.fixture
def ran(monkeypatch, faults):
    """Names of the cells that were run, each of which gives a made-up record."""
    names = []

    def run(job, work):
        if job.cell.method in faults:
            raise faults[job.cell.method]
        names.append(job.cell.name)
        return text_record(job.cell, [1.0, 2.0, 3.0], [2.0])

    monkeypatch.setattr(running, "in_own_process", run)
    return names


def test_a_killed_run_goes_on_with_what_is_missing(settings, ran, faults):
    faults["greedy"] = Killed()
    with pytest.raises(Killed):
        running.run(settings)
    faults.clear()
    assert ran == [c.name for c in PLAN[:2]]
    outcome = running.run(settings)
    assert ran == [c.name for c in PLAN]
    assert outcome.details["cells"]["done"] == outcome.details["cells"]["planned"] == 3
    assert running.run(settings).details == outcome.details
    assert len(ran) == 3


@pytest.mark.slow
def test_cells_that_workers_measure_are_recorded_and_one_that_fails_costs_no_other(settings, ran, monkeypatch):
    monkeypatch.setattr(running, "make_pool", SerialAway)
    monkeypatch.setattr(running, "cells", lambda quick: PLAN[:2])
    monkeypatch.setattr(running.Bench, "function", "tests.benchmarks.real_llm.records:made_up")
    outcome = running.run(replace(settings, place=ExecutorSpec(workers=2)))
    assert not ran
    assert outcome.details["failed"] == {PLAN[1].name: "a loss is NaN"}
    assert outcome.details["cells"]["done"] == 1
    bench = running.bench_of(settings)
    assert bench.finished.keys() == {PLAN[0].name}
    assert bench.store.tensors(PLAN[0]).read_bytes() == b"found by text"
    # What is there is not measured again, wherever that is; what failed is.
    running.run(settings)
    assert ran == [PLAN[1].name]


def test_other_settings_data_or_model_make_cells_stale(settings, ran, tmp_path):
    running.run(settings)
    running.run(replace(settings, seed=1))
    (tmp_path / "wikitext-2-raw" / "wiki.test.raw").write_text("other text")
    running.run(settings)
    (tmp_path / "model" / "config.json").write_text('{"a": 1}')
    running.run(settings)
    assert len(ran) == 4 * len(PLAN)
    # Files that are gone fail their cells.
    (tmp_path / "wikitext-2-raw" / "wiki.test.raw").rename(tmp_path / "moved")
    assert set(running.run(settings).details["failed"]) == {c.name for c in PLAN}
    assert len(ran) == 4 * len(PLAN)
    for missing, flag in (("model", "--model"), ("data_root", "--data-root")):
        with pytest.raises(DataError, match=flag):
            running.run(replace(settings, **{missing: None}))


def test_what_an_open_cell_stands_on_is_measured_again_where_its_tensors_are_gone(settings, ran, monkeypatch):
    few, more, most = plan = [Cell("gates", "wikitext", "paper", 0.5, documents=n) for n in (1, 2, 3)]
    monkeypatch.setattr(running, "cells", lambda quick: plan)
    running.run(replace(settings, only="*n1/*"))
    # What was run leaves nothing but its record.
    running.run(replace(settings, only="*n2/*"))
    assert ran == [few.name, few.name, more.name]
    state = running.bench_of(settings).store.tensors(more)
    write_atomic(state, b"state")
    running.run(replace(settings, only="*n3/*"))
    assert ran[3:] == [most.name]
    state.unlink()
    assert running.run(settings).details["cells"]["done"] == 3
    running.bench_of(settings).store.path(most).unlink()
    # Records count for the tables while nothing is measured.
    assert running.run(replace(settings, minutes=0)).details["cells"]["done"] == 2
    running.run(replace(settings, only="*n3/*"))
    assert ran[4:] == [few.name, more.name, most.name]


def test_only_minutes_and_the_list(settings, ran):
    (figure,) = running.run(replace(settings, only="text/*/learned*,*/base/*")).figures
    assert figure.name == "T13 wikitext: lower end of the 95 % interval of the gain, <= 1 % off, nats per token"
    assert ran == [c.name for c in PLAN[:2]]
    running.run(replace(settings, minutes=0))
    assert len(ran) == 2
    rows = running.listing(settings)
    assert [row["done"] for row in rows] == [True, True, False]
    assert [row["name"] for row in rows] == [c.name for c in PLAN]
    assert all(row["seconds"] > 0 for row in rows)


def test_one_cell_that_fails_costs_no_other(settings, ran, faults):
    faults["learned"] = NumericError("a loss is NaN")
    outcome = running.run(settings)
    assert ran == [PLAN[0].name, PLAN[2].name]
    assert "a loss is NaN" in outcome.details["failed"][PLAN[1].name]
    # It is tried again.
    assert PLAN[1].name in running.run(settings).details["failed"]


def test_a_cell_ends_with_the_run_that_was_killed(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(_KILLED)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as run:
        cell = int(run.stdout.readline())
        run.kill()
    assert soon(lambda: not runs(cell))


_KILLED = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from freemoe.core.run.processes import end_with_parent

def cell():
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        pool.submit(cell).result()
"""


def test_a_union_switches_off_what_either_expert_does():
    def kept(**weights):
        return {f"off|{name}": encode_sorted(torch.tensor(where)) for name, where in weights.items()}

    sized = [SimpleNamespace(name=name, size=6) for name in "abc"]
    union = joined(sized, [kept(a=[1, 5], b=[0]), kept(a=[2, 5], c=[3])])
    assert {name: where.tolist() for name, where in indices_of(union).items()} == {"a": [1, 2, 5], "b": [0], "c": [3]}


@pytest.mark.realdata
def test_a_router_sends_questions_to_the_experts_of_tasks(real, monkeypatch):
    names = ("arc-easy", "arc-challenge")  # so alike that some go astray, and a careful router would abstain
    monkeypatch.setattr(DomainRouter, "abstains", lambda *_: False)
    for module in (planned, routing, running):
        monkeypatch.setattr(module, "TASKS", [MATERIALS[n] for n in names])
    experts = [Cell("task", n, "learned", 0.01) for n in names]
    cell = Cell("route", ALL, "learned", 0.01)
    monkeypatch.setattr(running, "cells", lambda quick: [cell, *experts])
    bench = running.bench_of(real)
    bench.run_missing("route/*", None, real.progress)
    assert not bench.finished  # it waits for the experts
    bench.run_missing("task/*", None, real.progress)
    # Whatever training found on so few questions, these two change what is answered.
    for expert, seed in zip(experts, (0, 1), strict=True):
        weight = find_weights(load_base(real.model, dtype="float32", device="cpu")[0])[seed]
        half = {f"off|{weight.name}": encode_sorted(torch.arange(0, weight.size, 2))}
        write_atomic(bench.store.tensors(expert), save(half))
    bench.run_missing("route/*", None, real.progress)
    assert not bench.failed
    found = bench.finished[cell.name]["tasks"]
    for name, other in (names, names[::-1]):
        stand = stand_on(experts[names.index(name)], real, bench.protocol)
        kept = load_file(bench.store.tensors(experts[names.index(other)]))
        with switched_off(stand.weights, joined(stand.weights, [kept])):
            expected = [s.value for s in stand.scores(stand.data.reported)]
        assert found[name]["ids"] == [d.id for d in stand.data.reported]
        for picked, right, value in zip(found[name]["picked"], found[name]["right"], expected, strict=True):
            assert picked in names
            assert right == (value if picked == other else None)
        assert found[name]["abstains"] == [False] * len(expected)
    assert any(p != n for n in names for p in found[n]["picked"])


@pytest.mark.realdata
@pytest.mark.parametrize("cell", [PLAN[1], LORA], ids=["learned", "lora"])
def test_what_was_trained_in_bfloat16_stands_on_the_fp32_base(real, cell):
    stand = stand_on(cell, real, replace(quick_protocol(), train="bfloat16"))
    model, reported = stand.model, stand.data.reported
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    base = sum(s.value for s in stand.scores(reported))
    with METHODS.get(cell.method)(stand) as found:
        assert found.losses[0] > min(found.losses)
        stand.use(found.model or model)
        after = dict(stand.model.named_parameters())
        assert {p.dtype for p in after.values()} == {torch.float32}
        assert sum(s.value for s in stand.scores(reported)) > base
        changed = [n for n, p in before.items() if not torch.equal(after[n], p)]
        linear = [w.name for w in stand.weights]
        assert set(changed) <= set(linear)
        if cell.method == "learned":
            # What is not off has the base's own bits.
            assert all(((after[n] == before[n]) | (after[n] == 0)).all() for n in changed)
        else:
            assert len(changed) == len(linear)


@pytest.mark.realdata
def test_cells_on_a_real_small_model(real, monkeypatch):
    union = Cell("union", "wikitext", "learned", 0.01, other="wikitext")
    plan = [PLAN[0], LORA, PLAN[1], Cell("task", "gsm8k-matching"), union]
    monkeypatch.setattr(running, "cells", lambda quick: plan)
    bench = running.bench_of(real)
    bench.run_missing(None, None, real.progress)
    assert not bench.failed
    base, lora, off, _, union = (bench.finished[c.name] for c in plan)
    for found in (lora, off):
        assert found["ids"] == base["ids"]
        assert set(found["guard"]["ids"]) < set(base["guard"]["ids"])
        assert sum(found["nll"]) < sum(base["nll"])
    assert 0 < off["share_off"] <= 0.01
    assert off["tokens_trained"] > lora["tokens_trained"] > 0
    # An expert joined with itself is itself, and is read back from its file.
    assert union["columns"]["wikitext"]["nll"] == pytest.approx(off["nll"], rel=1e-6)
    # So is an adapter.
    stand = stand_on(LORA, real, bench.protocol)
    with_adapter(stand, load_file(bench.store.tensors(LORA)), 1)
    again = per_document("text", stand.scores(stand.data.reported))
    assert again["nll"] == pytest.approx(lora["nll"], rel=1e-5)
    assert len(running.run(real).figures) == len(figures_of({}))
