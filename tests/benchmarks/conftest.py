"""The command line of the benchmarks, in the test's own process, and benchmarks that are made up."""

import math
import sys
import types
from functools import partial

import pytest

from benchmarks.cli import app
from benchmarks.harness import BENCHES, Figure, Outcome
from freemoe.cli import run_program
from tests.cli.conftest import folder, freemoe, started

__all__ = ["bench", "folder", "freemoe"]


@pytest.fixture
def bench(capsys, monkeypatch, tmp_path_factory):
    """Run ``python -m benchmarks ARGUMENTS`` and say how it ended."""
    start = partial(run_program, app, "python -m benchmarks")
    yield from started(capsys, monkeypatch, tmp_path_factory.mktemp("cache"), start=start)


@pytest.fixture
def seen(monkeypatch):
    """Benchmarks ``pretend``, whose figure is met, ``fails``, whose figure is not, and ``hole``, without one; their settings."""
    settings = []
    for name, value in (("pretend", 7.0), ("fails", 5.0), ("hole", math.nan)):
        module = types.ModuleType(f"benchmarks.{name}")

        def run(given, value=value):
            settings.append(given)
            return Outcome((Figure("speed", value, 6.0), Figure("beside", value)), {"seed": given.seed})

        module.run = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(BENCHES._entries, name, module.__name__)
        monkeypatch.setitem(BENCHES._about, name, "for this test")
    return settings
