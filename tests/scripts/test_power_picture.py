"""The picture of what the guard can find shows what the guard's forecast says."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from freemoe.evals.statistics import detectable_gain

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "power_picture.py"))


@pytest.mark.parametrize("drawn", [True, False])
def test_the_lines_are_the_gains(drawn, tmp_path):
    picture = tmp_path / "power.svg" if drawn else SCRIPT["PICTURE"]
    if drawn:
        SCRIPT["main"](picture)
    text = picture.read_text()
    lines = [re.findall(r"[ML] (\S+) (\S+)", path) for path in re.findall(r'<path d="([^"]*)"', text)]
    lines = [np.array(line, float) for line in lines if len(line) == len(SCRIPT["DOCUMENTS"])]
    assert len(lines) == len(SCRIPT["TESTS"])
    gains = [[detectable_gain(n, SCRIPT["ALPHA"] / tests) for n in SCRIPT["DOCUMENTS"]] for tests in SCRIPT["TESTS"]]
    heights = np.concatenate([line[:, 1] for line in lines])
    slope, start = np.polyfit(np.log(gains).ravel(), heights, 1)
    assert np.abs(slope * np.log(gains).ravel() + start - heights).max() < 0.1
    assert all(f"{tests} tests" in text for tests in SCRIPT["TESTS"])
