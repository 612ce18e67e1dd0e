"""The benchmark of switching: its figures, and that it stops when a bit is wrong."""

import pytest

from benchmarks.harness import Settings
from benchmarks.speed import switch as bench
from freemoe.core.errors import NumericError
from freemoe.models import switchboard


def test_figures_of_a_quick_run():
    outcome = bench.run(Settings(quick=True))
    figures = outcome.figures
    assert len(figures) == 6
    assert {(f.target, f.better, f.value > 0, "bit-equal" in f.note) for f in figures} == {(1.5, "lower", True, True)}
    assert figures[0].name == "switching, band of 10% width, float32"
    assert figures[-1].name == "switching, single switches, 1% off, bfloat16"
    for kind, size in (("float32", 4), ("bfloat16", 2)):
        for case in bench.CASES:
            details = outcome.details[f"{case.name}, {kind}"]
            assert details["bytes_held"] == (4 + size) * details["switched_off"]
            assert details["switched_off"] == pytest.approx(case.share * outcome.details["weights"], rel=0.1)
            assert details["share_of_base"] < 0.32


def test_a_wrong_bit_is_an_error(monkeypatch):
    add = switchboard._ExpertBlock.add

    def sloppy(part, bits, times):
        add(part, bits, times)
        bits[0, int(part.places[0])] ^= 1

    monkeypatch.setattr(switchboard._ExpertBlock, "add", sloppy)
    with pytest.raises(NumericError, match="is not what"):
        bench.run(Settings(quick=True))
