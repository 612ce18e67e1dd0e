"""Parts of a run whose folder the workers do not see."""

import os
import time

import pytest
import torch

from freemoe.core.errors import NumericError
from freemoe.core.run import away
from freemoe.core.run.ahead import ParallelStages
from freemoe.core.run.folder import RunFolder
from tests.core.run.away import SerialAway
from tests.core.run.test_journal import never

WORK = "tests.core.run.work:part"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where workers' folders are, for one test alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(away.tempfile, "gettempdir", lambda: str(folder))
    monkeypatch.setattr(away.tempfile, "tempdir", str(folder))
    away.remove_worker_folder()
    yield folder
    away.remove_worker_folder()


def begun(tmp_path):
    run = RunFolder(tmp_path / "out", {"a": 1})
    run.run_tensor_unit("common", lambda: {"a": torch.ones(3)})
    run.run_tensor_unit("mask|one", lambda: {"a": torch.zeros(2)})
    run.run_tensor_unit("mask|two", lambda: {"a": torch.zeros(2)})
    return run


def reads(stage, name, unit):
    return unit in ("common", f"mask|{name}")


def test_what_they_finish_stands_in_the_run_as_if_it_had_been_done_there(tmp_path, temporary):
    run, executor, told = begun(tmp_path), SerialAway(), list[str]()
    with ParallelStages(run, executor, WORK, {"times": 2}, reads) as ahead:
        assert ahead.run_stage("search", ["one", "two"], told.append) == {"one", "two"}
        assert told == ["one", "two"]
        # Common tensors and each one's mask; and what was found there.
        (here,) = temporary.glob(f"{away.PREFIX}*")
        assert len(list(here.glob("*/run.partial/units/*"))) == 3 + 2
        before = len(executor.shared)
        # The journal has changed, and is sent again; nothing else is, and what is finished there is known.
        ahead.run_stage("search", ["one", "two"], told.append)
        assert len(executor.shared) <= before + 1 + 2
    names = [f"search|{name}/{what}" for name in ("one", "two") for what in (0, 1, "found")]
    assert run.journal.unit_names() == ["common", "mask|one", "mask|two", *names]
    assert run.journal.run_unit("search|two/1", never) == 3.0
    assert torch.equal(run.run_tensor_unit("search|one/found", never)["sum"], torch.tensor([3.0, 0.0]))
    assert (run.journal.done, run.journal.reused) == (9, 0)
    assert not list((run.partial / "parts").iterdir())


def test_an_error_comes_as_itself_and_what_was_finished_stays(tmp_path):
    run = begun(tmp_path)
    with (
        ParallelStages(run, SerialAway(), WORK, {"times": 1, "fails": "two"}, reads) as ahead,
        pytest.raises(NumericError),
    ):
        ahead.run_stage("search", ["one", "two"], lambda name: None)
    assert "search|one/0" in run.journal
    assert "search|two/0" not in run.journal


def test_folders_of_workers_that_are_gone_are_removed(temporary):
    old, young = temporary / f"{away.PREFIX}old", temporary / f"{away.PREFIX}young"
    for folder in (old, young):
        folder.mkdir()
    an_hour_ago = time.time() - 3600
    os.utime(old, (an_hour_ago, an_hour_ago))
    own = away._worker_folder()
    assert {p.name for p in temporary.iterdir()} == {young.name, own.name}
    # One that lives holds its own, however old it is.
    os.utime(own, (an_hour_ago, an_hour_ago))
    if (child := os.fork()) == 0:
        away._remove_dead_folders(temporary)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert own.exists()
    away.remove_worker_folder()
    assert not own.exists()
