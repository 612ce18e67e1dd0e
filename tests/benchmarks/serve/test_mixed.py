"""The benchmark of mixed batches: its figures, and that it stops when an answer is wrong."""

import pytest

from benchmarks.harness import Settings
from benchmarks.serve import mixed as bench
from freemoe.core.errors import NumericError
from freemoe.models.mixed import parts


def test_figures_of_a_quick_run():
    outcome = bench.run(Settings(quick=True, only="135M, float32"))
    assert [f.name for f in outcome.figures] == [
        "mixed batch over the base, 135M, float32",
        "mixed batch over a switch per sequence, 135M, float32",
        "mixed batch over LoRA r=8, 135M, float32",
        "memory per expert over its bytes on disk, 135M",
        "memory per expert over its bytes on disk, 1.1G",
    ]
    assert [f.target for f in outcome.figures] == [0.8, 3.0, 1.3, 4.0, 4.0]
    assert all(f.value > 0 for f in outcome.figures)
    assert "0 before its first use" in outcome.figures[-1].note
    found = outcome.details["135M, float32"]
    assert found["error"] < 1e-5
    assert {side: len(s) for side, s in found["seconds"]["tokens"].items()} == dict.fromkeys(
        ("dense", "mixed", "swap", "lora"), 1
    )


def test_a_wrong_answer_is_an_error(monkeypatch):
    # Every expert has nothing off in a mixed batch.
    monkeypatch.setattr(parts.WeightMask, "is_scattered", property(lambda self: False))
    with pytest.raises(NumericError, match="of the largest logit away"):
        bench.run(Settings(quick=True, only="135M, float32"))
