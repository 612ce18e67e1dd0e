"""The command line of the benchmarks, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.cli import app
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
