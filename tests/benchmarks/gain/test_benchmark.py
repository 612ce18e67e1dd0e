"""The gain benchmark: what is compared, what is chosen by what, and the real material."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.gain import bases
from benchmarks.gain import benchmark as gain
from benchmarks.gain.bases import SEEDS, base_folder, benchmark_specs, eval_seed, is_ready
from benchmarks.gain.contest import Job, compete, side_by_side
from benchmarks.gain.materials import MATERIALS, read_material
from benchmarks.harness import Settings
from benchmarks.rivals.rival import Schedule
from freemoe.core.errors import DataError
from freemoe.core.run.progress import QuietProgress
from freemoe.domain_experts.prove.evidence import mean_gain
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.statistics import over_seeds
from freemoe.evals.tasks.domains import load_domain
from scripts import make_demo_model
from scripts.tiny_world import write_benchmark
from tests.benchmarks.real_llm.conftest import small_root  # noqa: F401  a fixture
from tests.rows import write_rows

QUICK = Schedule(steps=4, step_tokens=512, every=2, patience=1)


def result(name, losses, **more):
    job = {"material": "m", "rate": 0.0}
    return {"name": name, "losses": losses, "job": job, "numbers": 0, "bytes": 0, **more}


def test_a_rate_is_chosen_by_the_stopping_loss_alone():
    results = [
        result("LoRA r=1, lr 0.01", [3.0, 2.5], nll=[1.0]),
        result("LoRA r=1, lr 0.002", [3.0, 2.4, 2.6], nll=[99.0]),
        result("LoRA r=4, lr 0.01", [3.0, 2.0], nll=[5.0]),
    ]
    assert [r["name"] for r in gain.chosen(results)] == ["LoRA r=1, lr 0.002", "LoRA r=4, lr 0.01"]


def test_the_interval_over_bases_is_students():
    interval = over_seeds([4.0, 6.0, 8.0])
    # Two degrees of freedom: 4.303 standard errors of 2 / sqrt(3).
    assert interval.mean == 6.0
    assert interval.high - 6.0 == pytest.approx(4.3027 * 2 / math.sqrt(3), rel=1e-4)
    assert over_seeds([4.0]).low == -math.inf


def test_a_row_that_a_domain_lacks_counts_as_its_base():
    documents = [{"key": "a", "base": 0.0, "routed": 1.0}, {"key": "b", "base": 1.0, "routed": 1.0}]
    domain = {"documents": documents, "rows": {"base": {}, "routed": {}}}
    assert [mean_gain([domain], row).mean for row in ("routed", "control")] == [50.0, 0.0]


def test_without_real_data_the_figures_that_need_it_are_missed(monkeypatch):
    monkeypatch.setattr(gain, "demo_gain", lambda settings: ([], {}))
    (lost,) = gain.run(Settings()).figures
    assert lost.verdict(False) == "missed"
    assert "--data-root" in lost.line()


def test_bases_are_fresh_and_kept_by_what_decides_them(tmp_path):
    assert make_demo_model.SEED not in SEEDS
    assert make_demo_model.EVAL_SEED not in [eval_seed(s) for s in SEEDS]
    folder = base_folder(tmp_path, SEEDS[0], False)
    assert not is_ready(folder, SEEDS[0], False)
    provenance = folder / "demo_model" / "PROVENANCE.json"
    record = {**make_demo_model.recipe(SEEDS[0], eval_seed(SEEDS[0]), make_demo_model.STEPS), "tokens": 1}
    write_rows(provenance, [record])
    assert is_ready(folder, SEEDS[0], False)
    assert not is_ready(folder, SEEDS[1], False)
    write_rows(provenance, [{**record, "learning_rate": 1.0}])
    assert not is_ready(folder, SEEDS[0], False)


def test_a_base_that_cannot_be_trained_says_how_it_ended(tmp_path, monkeypatch, capsys):
    def run_here(command, **how):
        assert command[:3] == [sys.executable, "-m", "scripts.make_demo_model"]
        monkeypatch.setattr(sys, "argv", command[2:])
        with pytest.raises(SystemExit) as ended:
            make_demo_model.main()
        return subprocess.CompletedProcess(command, ended.value.code, stderr=capsys.readouterr().err)

    monkeypatch.setattr(bases.subprocess, "run", run_here)
    monkeypatch.setattr(bases, "_steps", lambda quick: 0)
    with pytest.raises(DataError, match="steps is 0"):
        bases.fresh_bases(tmp_path, [5], True, QuietProgress())


def test_a_fresh_benchmark_is_a_domain(tmp_path):
    write_benchmark(tmp_path / "benchmark", eval_seed(SEEDS[0]))
    for name, specs in benchmark_specs(tmp_path).items():
        domain = load_domain(name, specs)
        assert len(domain.reference) > 100
        assert len(domain.reported) > 100


@pytest.mark.realdata
@pytest.mark.parametrize("name", MATERIALS)
def test_material_trains_on_other_documents_than_it_reports(name, stories, small_root):  # noqa: F811
    model, tokenizer = stories
    material, again = (read_material(name, small_root, Scorer(model, tokenizer), 0, 40) for _ in range(2))
    assert again == material
    gradient, stop = ({p.continuation for p in part} for part in (material.gradient, material.stop))
    assert all((gradient, stop))
    assert not gradient & stop
    if material.reported[0].kind == "text":
        assert not {d.tokens for d in material.reported} & (gradient | stop)
        return
    trained = {tokenizer.decode(ids) for ids in gradient | stop}
    for document in material.reported:
        assert 3 <= len(document.answers) <= 5
        assert not any(document.prompt.strip() in text for text in trained)
    # The right answer stands everywhere, so that its place gives nothing away.
    assert {d.gold for d in material.reported} >= {0, 1, 2, 3}


@pytest.mark.hardening
@pytest.mark.realdata
def test_every_method_competes_on_text(stories, data_root):
    job = Job("wikitext", str(data_root), limit=16, schedule=QUICK)
    methods = {"learned": {}, "lora": {"rank": 1, "rate": 1e-2}, "full": {"rate": 1e-3}}
    base, *others = map(compete, [job, *(replace(job, method=name, **how) for name, how in methods.items())])
    assert base["numbers"] == base["bytes"] == 0
    for found in others:
        assert found["keys"] == base["keys"]
        assert found["tokens"] == base["tokens"]
        # Whatever never beat the base on the stopping documents is the base.
        if min(found["losses"]) == found["losses"][0]:
            assert found["nll"] == pytest.approx(base["nll"], rel=1e-5)
        else:
            assert sum(found["nll"]) < sum(base["nll"])
    assert others[0]["share_off"] <= 0.01
    assert others[1]["numbers"] == 5780
    assert others[1]["bytes"] == 2 * 5780


@pytest.mark.realdata
def test_jobs_run_in_processes_of_their_own_and_come_back_in_order(stories, small_root):  # noqa: F811
    job = Job("arc-easy", str(small_root), limit=16, schedule=QUICK)
    found = side_by_side(compete, [job, replace(job, method="lora", rate=1e-2)], QuietProgress(), "test")
    assert [f["name"] for f in found] == ["base", "LoRA r=1, lr 0.01"]
    assert found[0]["right"] == compete(job)["right"]
