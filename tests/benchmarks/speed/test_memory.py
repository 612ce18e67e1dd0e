"""The benchmark of memory: its figures, its stages, and that a stage's peak is seen."""

import pytest
import torch

from benchmarks.harness import Settings, in_own_process
from benchmarks.speed import memory as bench
from freemoe.domain_experts.cost.memory import FITTED, STAGES


def test_figures_of_a_quick_run(monkeypatch):
    real = bench.in_own_process
    asked_of = []

    def own(module, asked):
        asked_of.append(asked)
        # One process is enough to see that such a process works.
        if asked[:2] == ["scoring", 1]:
            return real(module, asked)
        peak, said, weights = (number * asked[1] for number in (3e9, 2e9, 10**9))
        return {"peak": peak, "said": said, "most": 4e9, "weights": weights, "parameters": 1}

    monkeypatch.setattr(bench, "in_own_process", own)
    outcome = bench.run(Settings(quick=True))
    assert [(stage, number) for stage, number, *_ in asked_of] == [(s, n) for n in bench.QUICK_LAYERS for s in STAGES]
    assert len(outcome.figures) == 2 * len(STAGES)
    peak, distance = outcome.figures[-2:]
    assert (peak.value, peak.target) == pytest.approx((6e9 / 2**30, 4e9 / 2**30), rel=1e-2)
    assert "3.00 bytes per weight, 3.00 between the two sizes" in peak.note
    assert distance.note == "+50%"
    assert (distance.value, distance.target, distance.better) == (pytest.approx(50), 25, "lower")
    small = outcome.details["measured"]["scoring"]["1"]
    assert small["peak"] > 0 < small["said"]
    assert small["weights"] < small["parameters"]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_runs_and_leaves_the_base_alone(stage, monkeypatch):
    model = bench.shaped_model("1.1G", Settings(quick=True), torch.bfloat16, num_hidden_layers=1)
    world = bench.bench_of(model, 0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    real = bench.Bench.score

    def score(self, mask):
        seen.append(mask.off_share(self.weights))
        real(self, mask)

    monkeypatch.setattr(bench.Bench, "score", score)
    found = bench.prepared(stage, world)()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    expected = {"scoring": [0], "band search": [0.1] * 2, "report": [0.01, 0.01, 0.1, 0.1]}.get(stage, [])
    assert seen == pytest.approx(expected, abs=0.02)
    if stage in FITTED:
        # What is found is forecast too, which is the largest moment of learned switches.
        assert found.mask.count
        assert found.forecast is not None


def test_what_is_taken_is_seen_and_goes_back():
    # In a process of its own: where much was freed before, blocks come from what is left of that.
    taken, left, peak = in_own_process("tests.benchmarks.speed.taken", ["8 Mi numbers"])
    assert left < 8 << 20
    assert min(taken, peak) > 30 << 20
