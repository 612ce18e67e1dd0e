"""The router's benchmark: what it measures, and that reported documents stay closed until the router is trained."""

import pytest

from benchmarks.harness import Settings
from benchmarks.speed import router as bench
from freemoe.evals.tasks.documents import ReportedSplit


def test_figures_of_a_quick_run(monkeypatch):
    events = []

    def count(owner, name):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: events.append(name) or work(*args, **more))

    count(bench, "train_on_subdomains")
    count(ReportedSplit, "open")
    outcome = bench.run(Settings(quick=True))
    # Reported documents open after training.
    assert events == ["train_on_subdomains"] * 2 + ["open"] * 3
    accuracy, *latencies = outcome.figures
    assert accuracy.name == "domain accuracy, demo"
    assert (accuracy.target, accuracy.better, accuracy.unit) == (95.0, "higher", " %")
    assert accuracy.value > 95
    assert [(f.target, f.better, f.unit, f.value > 0) for f in latencies] == [(1.0, "lower", " ms", True)] * 2
    assert latencies[1].name == "p95 per prompt beyond the embedding, 4096 features, 3 x 8 subdomains"
    linear, centroid = (outcome.details["demo"][kind]["reported"] for kind in ("linear", "centroid"))
    assert list(linear) == list(centroid) == ["math", "code", "general"]
    documents = sum(d["documents"] for d in linear.values())
    right = sum(d["domain_accuracy"] * d["documents"] for d in linear.values())
    assert accuracy.value == pytest.approx(100 * right / documents)
    assert f"{documents} reported documents" in accuracy.note
    assert outcome.details["demo"]["linear"]["reference"]["documents"] == 180


@pytest.mark.realdata
def test_the_real_case(data_root):
    figures, details = bench._case("real", bench.real_recipe(data_root, 0, 40), 1)
    # Few documents, and still far above the most frequent domain's share.
    assert figures[0].value > 85
    assert details["linear"]["reported"]["math"]["documents"] == 80
