"""What is asked of vLLM's first model runner, on a stand-in: vLLM itself is tried by `make vllm-test`."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from freemoe.compat.vllm import around_steps
from freemoe.core.errors import VersionError


def test_every_pass_is_inside_its_context_also_when_it_fails():
    seen = []

    @contextmanager
    def step():
        seen.append("in")
        try:
            yield
        finally:
            seen.append("out")

    runner = SimpleNamespace(_model_forward=lambda number: seen.append("run") or 1 // number)
    around_steps(runner, step)
    assert runner._model_forward(1) == 1
    with pytest.raises(ZeroDivisionError):
        runner._model_forward(number=0)
    assert seen == ["in", "run", "out"] * 2


def test_another_release_is_named():
    with pytest.raises(VersionError, match=r"no _model_forward.*0\.32\.0"):
        around_steps(SimpleNamespace(), lambda: contextmanager(lambda: iter([None]))())
