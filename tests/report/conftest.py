"""The pages of the four commands, rendered once."""

import pytest

from freemoe.report.figures.drawing import ReportFigure
from tests.report.family import FAMILY


@pytest.fixture(scope="session")
def pages():
    """Command -> HTML."""
    return {name: page(make()) for name, (make, page) in FAMILY.items()}


def sketch(picture, result):
    """A figure that is drawn but not written out, which is what takes the time."""
    return None if picture(result) is None else ("<svg></svg>", "<svg></svg>")


@pytest.fixture
def sketched(monkeypatch):
    """Pages whose figures are sketches."""
    monkeypatch.setattr(ReportFigure, "svgs", sketch)
