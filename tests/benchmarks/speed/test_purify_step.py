"""The benchmark of a training step: its figures, and what its sides train."""

import torch

from benchmarks.harness import Settings
from benchmarks.speed import purify_step as bench
from freemoe.models.weights import find_weights


def test_figures_of_a_quick_run(monkeypatch):
    real = bench.in_own_process
    # One process is enough to see that such a process works.
    monkeypatch.setattr(bench, "in_own_process", lambda m, asked: real(m, asked) if asked[0] == "switches" else 10**9)
    outcome = bench.run(Settings(quick=True))
    assert [f.target for f in outcome.figures[:4]] == [1.6, None, None, 3.0]
    assert len(outcome.figures) == 8
    assert all(f.value > 0 for f in outcome.figures)
    assert outcome.details["seconds"].keys() == outcome.details["bytes"].keys() == set(bench.SIDES)
    assert outcome.details["bytes"]["switches"] > 1e7


def test_a_step_of_switches_goes_all_the_way_and_leaves_the_model_alone(monkeypatch):
    model = bench._model(Settings(quick=True))
    weights = find_weights(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    masks = []
    real = bench._switch_topk

    def spy(*given):
        found = real(*given)
        masks.append(found[0])
        return found

    monkeypatch.setattr(bench, "_switch_topk", spy)
    step = bench.switches_step(model, weights, bench.random_batch(model, Settings(quick=True)), False)
    step()
    step()
    assert 0 < masks[0].count <= sum(w.size for w in weights) // 100
    assert not masks[0].is_equal(masks[1])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
