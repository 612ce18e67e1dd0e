"""The pages of the four commands, rendered once."""

import pytest

from freemoe.report.figures.drawing import ReportFigure
from tests.report.family import FAMILY


class Pages(dict):
    """Command -> HTML, rendered when it is first asked for."""

    def __missing__(self, command):
        make, page = FAMILY[command]
        self[command] = page(make())
        return self[command]


@pytest.fixture(scope="session")
def pages():
    return Pages()


def sketch(picture, result):
    """A figure that is drawn but not written out, which is what takes the time."""
    return None if picture(result) is None else ("<svg></svg>", "<svg></svg>")


@pytest.fixture
def sketched(monkeypatch):
    """Pages whose figures are sketches."""
    monkeypatch.setattr(ReportFigure, "svgs", sketch)
