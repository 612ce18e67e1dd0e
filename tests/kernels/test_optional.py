"""Without a package, with another version of it, on a device that its kernels do not run on: the same numbers, and one line."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from freemoe.kernels import optional
from freemoe.kernels.experts import reference_experts
from freemoe.kernels.optional import falls_back_to, importable, triton_takes
from freemoe.kernels.triton_experts import triton_available, triton_experts
from tests.kernels.test_experts import layer, tokens


@pytest.fixture(autouse=True)
def no_failures(monkeypatch):
    monkeypatch.setattr(optional, "failures", {})


@pytest.fixture
def any_triton(monkeypatch):
    monkeypatch.setattr(optional, "importable", lambda package: True)


def test_a_kernel_that_fails_is_said_once_and_not_tried_again(caplog):
    tried = []

    @falls_back_to(lambda x, factor: x * factor)
    def scaled(x, factor):
        tried.append(x.device)
        raise RuntimeError("ptxas: unknown target")

    for _ in range(3):
        assert scaled(torch.ones(2), 3).tolist() == [3, 3]
    assert tried == [torch.device("cpu")]
    assert [record.getMessage() for record in caplog.records] == [
        "scaled does not run on cpu, and torch computes the same there: RuntimeError: ptxas: unknown target"
    ]
    # Another device may have what this one lacks.
    scaled(torch.ones(2, device="meta"), 3)
    assert len(tried) == len(caplog.records) == 2


def test_a_full_device_is_no_failure_of_the_kernel(caplog):
    @falls_back_to(torch.neg)
    def full(x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        full(torch.ones(2))
    assert not optional.failures
    assert not caplog.records


@torch.no_grad()
def test_a_triton_of_another_version_gives_the_same_numbers(monkeypatch, caplog):
    # One without `triton.jit`.
    strange = ModuleType("triton")
    strange.language = ModuleType("triton.language")
    monkeypatch.setitem(sys.modules, "triton", strange)
    monkeypatch.setitem(sys.modules, "triton.language", strange.language)
    monkeypatch.delitem(sys.modules, "freemoe.kernels.triton_loops", raising=False)
    weights, index = layer()
    x, expert = tokens(7)
    with caplog.at_level(logging.WARNING):
        found = triton_experts(x, expert, weights, index)
    torch.testing.assert_close(found, reference_experts(x, expert, weights, index), rtol=0, atol=1e-5)
    assert [name for name, _ in optional.failures] == ["triton_experts"]
    assert len(caplog.records) == 1


def test_a_package_that_is_absent_or_broken(monkeypatch):
    assert importable.__wrapped__("json")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not importable.__wrapped__("triton")
    monkeypatch.setattr(optional, "importable", importable.__wrapped__)
    assert not triton_takes(torch.float32, "cuda")


@pytest.mark.usefixtures("any_triton")
def test_what_triton_takes():
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    assert [triton_takes(dtype, "cuda") for dtype in dtypes] == [False, True, True, True]

    def available(x, weight, name="silu"):
        given = SimpleNamespace(dtype=x, device=torch.device("cuda"))
        weights = SimpleNamespace(up=SimpleNamespace(dtype=weight), name=name)
        return triton_available(given, weights)

    assert available(torch.bfloat16, torch.bfloat16)
    assert not available(torch.float64, torch.float64)
    assert not available(torch.bfloat16, torch.float32)
    assert not available(torch.float32, torch.float32, "swish-like")


def test_an_installed_triton_changes_nothing_on_a_cpu(monkeypatch):
    # It is not even imported.
    monkeypatch.setattr(optional, "importable", lambda package: pytest.fail(f"{package} was asked for"))
    assert not triton_takes(torch.float32, "cpu")
