"""Disks that are full, over quota, read-only, limited or gone: what is said, and that nothing finished is lost."""

import contextlib
import errno
import os
import resource
import shutil

import pytest
import torch
from safetensors import SafetensorError

from freemoe.core.errors import ArtifactError, DiskError
from freemoe.core.files import as_disk_error, disk_error, write_atomic
from freemoe.core.run.folder import RunFolder
from tests.core.run.test_execute import Plain, System
from tests.core.run.test_journal import inside, never

REFUSALS = {
    "ENOSPC": r"The disk is full: .* could not be written \([\d,]+ bytes were to be written, [\d,]+ are free there\)\. Free",
    "EDQUOT": r"quota of the disk is used up: .*\([\d,]+ bytes were to be written",
    "EROFS": r"The file system is read-only: .*choose another place \(-o\)",
    "EFBIG": r"A file would be larger than .*ulimit -f",
    "EIO": r"The disk failed: ",
    "ESTALE": r"The network file system lost the folder: ",
}


class Refusing:
    """Lets so many writes of a run through, and refuses all others with an error of the system's."""

    def __init__(self, number, after):
        self.number, self.left = number, after

    def __call__(self, *_):
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))


def run_to_the_end(output):
    """Units of all kinds, files, publish."""
    run = RunFolder(output, {"a": 1})
    run.run_unit("first", lambda: 1)
    run.unit_state("second").write_state(lambda: {"x": torch.ones(3)}, now=True)
    run.run_tensor_unit("second", lambda: {"x": torch.arange(5)})
    run.run_unit("third", lambda: "x" * 500)
    write_atomic(run.partial / "file", b"contents")
    return run.publish_folder()


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_said(refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Refusing(getattr(errno, refusal), 0))
    with pytest.raises(DiskError, match=REFUSALS[refusal]) as caught:
        write_atomic(tmp_path / "a", b"some bytes")
    assert str(tmp_path / "a") in str(caught.value)
    assert "the same command" in str(caught.value)
    assert inside(tmp_path) == []


@pytest.mark.parametrize("after", range(7))
def test_wherever_the_disk_refuses_the_run_goes_on(after, tmp_path, monkeypatch):
    whole = run_to_the_end(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Refusing(errno.ENOSPC, after))
        with pytest.raises(DiskError, match="the same command"):
            run_to_the_end(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert not list((tmp_path / "out.partial").rglob("*.tmp"))
        # Refused again, it loses nothing of what it has.
        patched.setattr(os, "fsync", Refusing(errno.ENOSPC, 0))
        before = sorted((tmp_path / "out.partial").rglob("*"))
        with pytest.raises(DiskError):
            run_to_the_end(tmp_path / "out")
        assert set(before) <= {*(tmp_path / "out.partial").rglob("*"), tmp_path / "out.partial" / "running.pid"}
    found = run_to_the_end(tmp_path / "out")
    assert inside(found) == inside(whole)
    for name in inside(whole):
        assert (found / name).read_bytes() == (whole / name).read_bytes()


def test_a_full_disk_while_the_steps_prepare_throws_nothing_away(tmp_path, monkeypatch):
    """An input that is refused discards what only prepared; a disk that is refused does not."""
    system = System(Plain(str(tmp_path / "out")))
    steps = system.pipeline

    def filled(run):
        run.run_unit("features|a", lambda: 1)
        monkeypatch.setattr(os, "fsync", Refusing(errno.ENOSPC, 0))
        return steps(run)

    monkeypatch.setattr(system, "pipeline", filled)
    with pytest.raises(DiskError):
        system.run()
    monkeypatch.undo()
    assert "features|a" in (tmp_path / "out.partial" / "journal.jsonl").read_text()
    assert System(Plain(str(tmp_path / "out"))).run() == tmp_path / "out"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left (os error 28)"),
    ],
    ids=["raised", "quoted"],
)
def test_another_packages_error_is_put_into_our_words(error, tmp_path, monkeypatch):
    system = System(Plain(str(tmp_path / "out")))

    def steps(run):
        run.run_unit("a", lambda: 1)
        raise error

    monkeypatch.setattr(system, "pipeline", steps)
    with pytest.raises(DiskError, match=r"The disk is full: .*out\.partial"):
        system.run()


def test_what_is_no_disk_is_left_alone(tmp_path):
    absent = FileNotFoundError(errno.ENOENT, "absent")
    for error in (ValueError("os error 28"), absent, ArtifactError("x"), OSError("x")):
        assert as_disk_error(error, tmp_path) is None
    assert as_disk_error(absent, tmp_path / "gone") is not None
    # Room is told of the nearest folder that there is.
    error = disk_error(OSError(errno.ENOSPC, ""), tmp_path / "not" / "there", 7)
    assert "(7 bytes were to be written, " in str(error)
    assert "(7 bytes were to be written, 0 are" not in str(error)


@pytest.mark.parametrize("what", ["unit", "tensors", "state", "file", "publish"])
def test_a_folder_that_vanishes(what, tmp_path):
    run = RunFolder(tmp_path / "out", {"a": 1})
    run.run_unit("first", lambda: 1)
    shutil.rmtree(run.partial)
    ways = {
        "unit": lambda: run.run_unit("u", lambda: 1),
        "tensors": lambda: run.run_tensor_unit("t", lambda: {"x": torch.ones(1)}),
        "state": lambda: run.unit_state("s").write_state(lambda: {"x": torch.ones(1)}, now=True),
        "file": lambda: write_atomic(run.partial / "file", b""),
        "publish": run.publish_folder,
    }
    with pytest.raises(DiskError, match=r"The folder is not there: .*removed or unmounted"):
        ways[what]()
    assert not (tmp_path / "out").exists()


def test_halves_that_a_kill_left_are_removed_and_never_read(tmp_path):
    run = RunFolder(tmp_path / "out", {"a": 1})
    run.run_tensor_unit("t", lambda: {"x": torch.ones(1)})
    run.unit_state("s").write_state(lambda: {"x": torch.ones(1)}, now=True)
    halves = [run.partial / name for name in ("result.json.tmp", "units/0.safetensors.tmp", "states/0.tmp")]
    for path in halves:
        path.write_bytes(b"half")
    again = RunFolder(tmp_path / "out", {"a": 1})
    assert not any(path.exists() for path in halves)
    assert torch.equal(again.run_tensor_unit("t", never)["x"], torch.ones(1))
    assert again.unit_state("s").read_state() is not None


def test_a_true_limit_of_the_system(tmp_path):
    """RLIMIT_FSIZE: no patched function, a write that the kernel cuts off in its middle."""
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            run = RunFolder(tmp_path / "out", {"a": 1})
            run.run_unit("small", lambda: 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            try:
                run.run_unit("large", lambda: "x" * 5000)
            except DiskError as error:
                os._exit(7 if "ulimit -f" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    lines = (tmp_path / "out.partial" / "journal.jsonl").read_bytes()
    assert lines.count(b"\n") == 1
    assert lines.endswith(b"\n")
    again = RunFolder(tmp_path / "out", {"a": 1})
    assert (again.run_unit("small", never), again.run_unit("large", lambda: "x" * 5000)) == (1, "x" * 5000)
