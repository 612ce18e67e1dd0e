"""The pages of the four commands, rendered once."""

from __future__ import annotations

from typing import Any

import pytest

from freemoe.report.figures.drawing import ReportFigure
from tests.report.family import FAMILY


@pytest.fixture(scope="session")
def pages() -> dict[str, str]:
    """Command -> HTML."""
    return {name: page(make()) for name, (make, page) in FAMILY.items()}


def sketch(picture: ReportFigure, result: Any) -> tuple[str, str] | None:
    """A figure that is drawn but not written out, which is what takes the time."""
    return None if picture(result) is None else ("<svg></svg>", "<svg></svg>")


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages whose figures are sketches."""
    monkeypatch.setattr(ReportFigure, "svgs", sketch)
