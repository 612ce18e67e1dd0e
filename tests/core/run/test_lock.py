"""Two processes on one output: the second is told at once; a killed one is in nobody's way; this thread may come back."""

import contextlib
import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from freemoe.core.errors import DiskError, LockedError
from freemoe.core.files import MANIFEST
from freemoe.core.run import lock
from freemoe.core.run.folder import RunFolder, strip_if_finished
from freemoe.core.run.lock import acquire_lock, output_lock, release_lock
from tests.core.run.test_folder import artefact


def test_a_thread_is_told_too_and_the_same_one_may_come_back(tmp_path):
    def second():
        try:
            with output_lock(tmp_path / "out"):
                return "free"
        except LockedError:
            return "locked"

    # It ends with an error, too.
    with contextlib.suppress(ZeroDivisionError), output_lock(tmp_path / "out"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    assert second() == "free"
    with output_lock(tmp_path / "out"), ThreadPoolExecutor(1) as thread:
        assert thread.submit(second).result() == "locked"
        assert second() == "free"
    assert second() == "free"


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """The holder ends between the opening of its file and the locking of it."""
    assert lock.fcntl is not None
    real = lock.fcntl.flock

    def late(opened, how):
        (tmp_path / "l").unlink()
        real(opened, how)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    with pytest.raises(LockedError, match="finished by another run just now"):
        acquire_lock(tmp_path / "l", tmp_path / "out")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, None])
def test_where_there_are_no_locks_nobody_is_refused(number, tmp_path, monkeypatch):
    def without(*_):
        raise OSError(number, "no locks here")

    if number is None:
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr("fcntl.flock", without)
    with output_lock(tmp_path / "out"):
        pass
    release_lock(acquire_lock(tmp_path / "l", tmp_path / "out"))


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskError, match="could not be written"), output_lock(tmp_path / "file" / "scores.json"):
        pytest.fail("no such folder")


def test_killed_between_the_rename_and_the_tidying(tmp_path, monkeypatch):
    """The folder is whole: the same command says so, and tidies."""
    run = RunFolder(tmp_path / "out", {"a": 1})
    run.run_unit("u", lambda: 1)
    run.unit_state("s").write_state(dict, now=True)
    (run.partial / MANIFEST).write_text("{}")
    monkeypatch.setattr("freemoe.core.run.folder._remove_working_files", lambda output: None)
    run.publish_folder()
    monkeypatch.undo()
    assert not strip_if_finished(tmp_path / "out", {"a": 2})
    assert (tmp_path / "out" / "states").exists()
    assert strip_if_finished(tmp_path / "out", {"a": 1})
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [MANIFEST]
    assert not strip_if_finished(tmp_path / "out", {"a": 1})


def test_killed_between_the_two_renames_of_an_overwrite(tmp_path, monkeypatch):
    """The old folder has its name again before anything else is done."""
    artefact(tmp_path / "out")
    (tmp_path / "out.old-2020").mkdir()
    run = RunFolder(tmp_path / "out", {"a": 1}, overwrite=True)
    run.run_unit("u", lambda: 1)
    real = Path.rename

    def killed(path, target):
        if path == run.partial:
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        run.publish_folder()
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    again = RunFolder(tmp_path / "out", {"a": 1}, overwrite=True)
    assert (tmp_path / "out" / MANIFEST).exists()
    again.publish_folder()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.old-2020"]
    assert not (tmp_path / "out" / MANIFEST).exists()
