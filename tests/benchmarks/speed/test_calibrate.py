"""The benchmark of calibration: its figures, its batches, and that wrong sums stop it."""

import pytest
import torch

from benchmarks.harness import Settings
from benchmarks.speed import calibrate as bench
from freemoe.core.errors import NumericError
from freemoe.domain_experts.rank import calibrate as module


def test_figures_of_a_quick_run():
    outcome = bench.run(Settings(quick=True))
    assert [f.target for f in outcome.figures] == [1.15, None, None]
    assert outcome.figures[0].better == "lower"
    assert all(f.value > 0 for f in outcome.figures)
    assert (outcome.details["subdomains"], outcome.details["norms"]) == (12, 4)


def test_wrong_sums_are_an_error(monkeypatch):
    right = module.power_sums
    monkeypatch.setattr(module, "power_sums", lambda x, rows=None: right(x, rows) * 0.99)
    with pytest.raises(NumericError, match="not those of its tokens"):
        bench.run(Settings(quick=True))


def test_random_models_are_seeded_and_leave_the_seed_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    a, b, c = (bench.shaped_model("134M", Settings(quick=True, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(a.parameters()), next(c.parameters()))
