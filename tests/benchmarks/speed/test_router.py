"""The router's benchmark: what it measures, and that reported documents stay closed until the router is trained."""

import pytest

from benchmarks.harness import Settings
from benchmarks.speed import router as bench
from benchmarks.speed.router import real_recipe, run
from freemoe.evals.tasks.documents import ReportedSplit


def test_figures_of_a_quick_run(monkeypatch):
    events = []

    def count(owner, name):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: events.append(name) or work(*args, **more))

    count(bench, "train_on_subdomains")
    count(ReportedSplit, "open")
    outcome = run(Settings(quick=True))
    # Reported documents open after training.
    assert events == ["train_on_subdomains"] * 2 + ["open"] * 3
    accuracy, latency, wide = outcome.figures
    assert accuracy.name == "domain accuracy, demo"
    assert (accuracy.target, accuracy.better, accuracy.unit) == (95.0, "higher", " %")
    assert accuracy.value > 95
    for figure in (latency, wide):
        assert (figure.target, figure.better, figure.unit) == (1.0, "lower", " ms")
        assert figure.value > 0
    assert wide.name == "p95 per prompt beyond the embedding, 4096 features, 3 x 8 subdomains"
    linear = outcome.details["demo"]["linear"]
    assert list(linear["reported"]) == ["math", "code", "general"]
    documents = [d["documents"] for d in linear["reported"].values()]
    right = sum(d["domain_accuracy"] * d["documents"] for d in linear["reported"].values())
    assert accuracy.value == pytest.approx(100 * right / sum(documents))
    assert f"{sum(documents)} reported documents" in accuracy.note
    assert linear["reference"]["documents"] == 180
    assert outcome.details["demo"]["centroid"]["reported"].keys() == linear["reported"].keys()


@pytest.mark.realdata
def test_the_real_case(data_root):
    figures, details = bench._case("real", real_recipe(data_root, 0, 40), 1)
    # Few documents, and still far above the most frequent domain's share.
    assert figures[0].value > 85
    assert details["linear"]["reported"]["math"]["documents"] == 80
