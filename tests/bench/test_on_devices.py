"""Benchmarks with ``--device``: a CPU that plays an accelerator refuses tensors of two devices, and numpy what lies there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from freemoe.bench import devices
from freemoe.bench.harness import ON_DEVICES, Settings, in_turns
from freemoe.bench.hookmoe import speed as hookmoe
from freemoe.bench.speed import calibrate, large, shapes, switch
from freemoe.bench.tomoe import speed as tomoe_speed
from freemoe.domain_experts.purify import activations
from freemoe.evals import speed
from freemoe.models.checkpoints.loading import load_base
from tests.neighbours import Neighbours

CASES = {
    "calibrate": (calibrate, None),
    "switch": (switch, None),
    "hookmoe-speed": (hookmoe, None),
    "tomoe-speed": (tomoe_speed, "random masks"),
    "large": (large, None),
}


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a real accelerator can do is left out; models lie on the first device of `Neighbours`."""
    real = shapes.random_model

    def drawn(kind: str, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu", /, **sizes: Any) -> Any:
        assert device == "cuda:0"
        with torch._C.DisableTorchFunction():
            model = real(kind, seed, dtype, "cpu", **sizes)
            if kind != "llama":
                model.set_experts_implementation("eager")
            return model

    def bundled(name: str, dtype: str, device: str) -> tuple[Any, Any]:
        assert device == "cuda:0"
        with torch._C.DisableTorchFunction():
            model, tokenizer = load_base(name, dtype=dtype, device="cpu")
            model.set_experts_implementation("eager")
            return model, tokenizer

    monkeypatch.setattr(hookmoe, "load_base", bundled)
    for module in (shapes, calibrate, hookmoe, tomoe_speed, large):
        monkeypatch.setattr(module, "random_model", drawn)
    monkeypatch.setattr(speed, "_wait", lambda device: None)
    monkeypatch.setattr(activations, "free_bytes", lambda device: 1 << 33)
    for name, value in (("used_bytes", 0), ("peak_bytes", 1 << 20), ("reset_peak", None)):
        monkeypatch.setattr(large, name, lambda device, value=value: value)


def test_every_benchmark_that_goes_to_devices_is_tried() -> None:
    assert set(CASES) == set(ON_DEVICES)


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("name", CASES)
def test_nothing_meets_what_lies_elsewhere(name: str) -> None:
    module, only = CASES[name]
    with Neighbours():
        outcome = module.run(Settings(quick=True, device="cuda:0", only=only))
    assert outcome.figures
    for figure in outcome.figures:
        assert figure.value == figure.value, figure.note


def test_a_part_that_fails_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(large.memory, "prepared", full)
    outcome = large.run(Settings(quick=True, only="*: [cs]*"))
    lines = [figure.line() for figure in outcome.figures]
    assert [line.partition(":")[0] for line in lines] == ["7B shape, calibration over a plain forward pass"] + [
        "7B shape, calibration"
    ] + ["memory"] * 2
    assert lines[-1] == "memory: calibration: not measured; CUDA out of memory. Tried to allocate 20.00 GiB"
    assert outcome.details["memory: scoring"] == {"error": "CUDA out of memory. Tried to allocate 20.00 GiB"}


def test_the_large_base_measures_every_part() -> None:
    outcome = large.run(Settings(quick=True))
    assert set(large.PARTS) <= set(outcome.details)
    assert len(outcome.figures) == 5 + len(large.WEIGHED)
    assert all(figure.value > 0 for figure in outcome.figures if "memory" not in figure.name)
    assert "bytes per candidate" in outcome.figures[-1].note
    # Llama-2-7B, as its card counts it.
    assert large.SHAPE["num_hidden_layers"] * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096 == 6_738_149_376


def test_a_timing_begins_and_ends_when_the_device_has_nothing_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(devices, "wait", lambda: order.append("wait"))
    in_turns({"a": lambda: order.append("a")}, 2, warm=False)
    assert order == ["wait", "a", "wait"] * 2


@pytest.mark.parametrize("module", [ModuleType("cuda")])
def test_waiting_asks_every_device_that_was_used(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.synchronize = asked.append
    monkeypatch.setattr(torch, "cuda", module)
    devices.wait()
    assert asked == [0, 1]
