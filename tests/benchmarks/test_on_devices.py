"""Benchmarks with ``--device``: parts that fail, what the large base measures, and when a timing begins and ends."""

from types import SimpleNamespace
from unittest.mock import Mock

import torch

from benchmarks import devices
from benchmarks.harness import Settings, in_turns
from benchmarks.speed import large


def test_a_part_that_fails_says_so_and_the_others_go_on(monkeypatch):
    said = "CUDA out of memory. Tried to allocate 20.00 GiB"
    monkeypatch.setattr(large.memory, "prepared", Mock(side_effect=torch.OutOfMemoryError(said)))
    outcome = large.run(Settings(quick=True, only="*: [cs]*"))
    lines = [figure.line() for figure in outcome.figures]
    calibration = ["7B shape, calibration over a plain forward pass", "7B shape, calibration"]
    assert [line.partition(":")[0] for line in lines] == [*calibration, "memory", "memory"]
    assert lines[-1] == f"memory: calibration: not measured; {said}"
    assert outcome.details["memory: scoring"] == {"error": said}


def test_the_large_base_measures_every_part():
    outcome = large.run(Settings(quick=True))
    assert set(large.PARTS) <= set(outcome.details)
    assert len(outcome.figures) == 5 + len(large.WEIGHED)
    assert all(figure.value > 0 for figure in outcome.figures if "memory" not in figure.name)
    assert "bytes per candidate" in outcome.figures[-1].note
    # Llama-2-7B, as its card counts it.
    assert large.SHAPE["num_hidden_layers"] * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096 == 6_738_149_376


def test_a_timing_begins_and_ends_when_every_device_has_nothing_left_to_do(monkeypatch):
    order = []
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2, synchronize=order.append)
    monkeypatch.setattr(devices, "torch", SimpleNamespace(cuda=cuda))
    in_turns({"a": lambda: order.append("a")}, 2, warm=False)
    assert order == [0, 1, "a", 0, 1] * 2
