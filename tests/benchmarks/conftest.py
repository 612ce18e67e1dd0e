"""The command line of the benchmarks, in the test's own process, and benchmarks that are made up."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.cli import app
from benchmarks.harness import BENCHES, Figure, Outcome, Settings
from freemoe.cli import run_program
from tests.cli.conftest import Freemoe, folder, freemoe, started

__all__ = ["bench", "folder", "freemoe"]


@pytest.fixture
def bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Freemoe]:
    """Run ``python -m benchmarks ARGUMENTS`` and say how it ended."""
    start = partial(run_program, app, "python -m benchmarks")
    yield from started(capsys, monkeypatch, tmp_path_factory.mktemp("cache"), start=start)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Benchmarks ``pretend``, whose figure is met, ``fails``, whose figure is not, and ``hole``, without one; their settings."""
    settings: list[Settings] = []
    for name, value in (("pretend", 7.0), ("fails", 5.0), ("hole", math.nan)):
        module = types.ModuleType(f"benchmarks.{name}")

        def run(given: Settings, value: float = value) -> Outcome:
            settings.append(given)
            return Outcome((Figure("speed", value, 6.0), Figure("beside", value)), {"seed": given.seed})

        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(BENCHES._entries, name, module.__name__)
        monkeypatch.setitem(BENCHES._about, name, "for this test")
    return settings
