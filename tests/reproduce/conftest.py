"""Runs of the papers' tables that the tests of a folder share, as the command's own tables do."""

import math
from functools import partial

import pytest

from freemoe.cli import run_program
from freemoe.core.run.progress import QuietProgress
from reproduce.cli import app
from reproduce.running import DONE, PAPER_ONLY, Records, measure
from reproduce.table import Scene
from reproduce.writing import save
from tests.cli.conftest import started


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """Where runs are kept while the tests last."""
    return Records(tmp_path_factory.mktemp("papers") / "runs")


def check_runs(table, records, folder):
    """Fill a table at ``tiny`` and hold it to what every table promises; returns it."""
    filled = measure(table, Scene(limit=12, threads=1), records, QuietProgress())
    labels = [row["label"] for row in filled["rows"]]
    assert len(set(labels)) == len(labels)
    assert [row["label"] for row in filled["rows"] if row["paper"]] == [row.name for row in table.rows if row.paper]
    for found in filled["rows"]:
        if found["status"] == PAPER_ONLY:
            assert found["paper"] or found["why"], f"{found['label']}: nothing runs and nothing says why"
            continue
        assert found["status"] == DONE, f"{found['label']}: {found['why']}"
        assert found["ours"], f"{found['label']}: measured, and no column of the table filled"
        for column, measured in found["ours"].items():
            assert math.isfinite(measured["value"]), f"{found['label']}, {column}"
            if measured["gain"] is not None and measured["low"] is not None:
                assert measured["low"] <= measured["gain"] <= measured["high"], f"{found['label']}, {column}"
    assert "model: freemoe-demo" in filled["protocol"]
    written = save(filled, table, folder)
    assert f"### {table.name}: " in written["md"].read_text(encoding="utf-8")
    assert ("svg" in written) == bool(table.picture)
    if table.picture:
        assert written["svg"].read_text(encoding="utf-8").startswith("<svg")
    return filled


@pytest.fixture
def reproduce(capsys, monkeypatch, tmp_path_factory):
    """Run ``python -m reproduce ARGUMENTS`` and say how it ended."""
    start = partial(run_program, app, "python -m reproduce")
    yield from started(capsys, monkeypatch, tmp_path_factory.mktemp("cache"), start=start)
