"""Runs of the papers' tables that the tests of a folder share, as the command's own tables do."""

import math
from functools import partial

import pytest

from freemoe.cli import run_program
from freemoe.core.run.progress import QuietProgress
from freemoe.evals.tasks import user_tasks
from reproduce.cli import app
from reproduce.running import DONE, PAPER_ONLY, Records, measure
from reproduce.table import Scene
from reproduce.writing import save
from tests.cli.conftest import started


@pytest.fixture(scope="session")
def records(tmp_path_factory):
    """Where runs are kept while the tests last."""
    return Records(tmp_path_factory.mktemp("papers") / "runs")


@pytest.fixture(scope="session", autouse=True)
def tasks_read_once():
    """Every plan of a table reads the bundled tasks anew, which takes longer than to answer them: here once, as they are."""
    files, joined = {}, {}
    read, join = user_tasks.read_task_file, user_tasks.join_copies

    def read_once(source, task, data=None, tokenizer=None, wanted=None):
        # The bundled models have one tokenizer.
        key = str(source), task, data and data.model_dump_json(), tokenizer is None, wanted
        if key not in files:
            files[key] = read(source, task, data, tokenizer, wanted)
        return files[key]

    def join_once(documents):
        # Documents are kept with what they became, so that no other one gets their place in memory.
        key = tuple(map(id, documents))
        if key not in joined:
            joined[key] = documents, join(documents)
        return joined[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_tasks, "read_task_file", read_once)
        patch.setattr(user_tasks, "join_copies", join_once)
        yield


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
