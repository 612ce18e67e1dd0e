"""Benchmarks with ``--device``: nothing meets what lies elsewhere."""

import pytest

from benchmarks.harness import ON_DEVICES, Settings
from benchmarks.hookmoe import speed as hookmoe
from benchmarks.serve import mixed
from benchmarks.speed import calibrate, large, switch
from benchmarks.tomoe import speed as tomoe_speed
from freemoe.domain_experts.purify import activations

CASES = {
    "calibrate": (calibrate, None),
    "switch": (switch, None),
    "hookmoe-speed": (hookmoe, None),
    "tomoe-speed": (tomoe_speed, "random masks"),
    "mixed": (mixed, "135M, bfloat16"),
    "large": (large, None),
}


@pytest.fixture
def accelerated(monkeypatch, pretend_accelerator):
    """Memory is asked of CUDA by name, and is left out."""
    monkeypatch.setattr(activations, "free_bytes", lambda device: 1 << 33)
    for name, value in (("used_bytes", 0), ("peak_bytes", 1 << 20), ("reset_peak", None)):
        monkeypatch.setattr(large, name, lambda device, value=value: value)


def test_every_benchmark_that_goes_to_devices_is_tried():
    assert set(CASES) == set(ON_DEVICES)


@pytest.mark.hardening
@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("name", CASES)
def test_nothing_meets_what_lies_elsewhere(name):
    module, only = CASES[name]
    outcome = module.run(Settings(quick=True, device="pretend:0", only=only))
    assert outcome.figures
    for figure in outcome.figures:
        assert figure.value == figure.value, figure.note
