"""Run folders: nothing finished is done twice, nothing half written is seen, nobody else's folder is touched."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from freemoe.core.environment import describe_environment, package_versions
from freemoe.core.errors import ArtifactError
from freemoe.core.files import MANIFEST, write_atomic
from freemoe.core.memory import peak_memory_bytes
from freemoe.core.run import folder as run_folder
from freemoe.core.run.folder import RunFolder
from tests.core.run.test_journal import full_disk, inside, never

RECIPE = {"command": "build", "seed": 0, "bands": {"p": "2", "step": 0.1}, "domains": {"math": ["gsm8k"]}}


def started(output, recipe=None, **options):
    """A run that was killed after one unit of work."""
    run = RunFolder(output, recipe or RECIPE, **options)
    run.journal.run_unit("u", lambda: 1)
    return run


def artefact(folder, content="old"):
    folder.mkdir()
    (folder / MANIFEST).write_text('{"format": 3, "kind": "x", "files": {"content": "its checksum"}}')
    (folder / "content").write_text(content)
    return folder


OTHER = {**RECIPE, "seed": 1}


@pytest.mark.parametrize(
    ("recipe", "options", "known"),
    [
        (RECIPE, {}, True),
        (RECIPE, {"resume": False}, False),
        (OTHER, {"resume": False}, False),
        (RECIPE, {"overwrite": True}, True),
        (OTHER, {"overwrite": True}, False),
    ],
)
def test_whose_unfinished_work_is_gone_on_with(recipe, options, known, tmp_path):
    started(tmp_path / "out")
    assert ("u" in RunFolder(tmp_path / "out", recipe, **options).journal) is known


def test_another_recipe_is_refused_and_the_fields_are_named(tmp_path, monkeypatch):
    started(tmp_path / "out")
    other = {**RECIPE, "seed": 1, "bands": {"p": "4", "step": 0.1}, "threads": 2}
    with pytest.raises(ArtifactError, match=r"differs in: seed, bands.p, threads\).*--no-resume to discard"):
        RunFolder(tmp_path / "out", other)
    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "package_versions", lambda packages: {**package_versions(packages), "torch": "0"})
        with pytest.raises(ArtifactError, match=r"differs in: versions\.torch\)"):
            RunFolder(tmp_path / "out", RECIPE)
    # Neither is a damaged identity taken for ours.
    (tmp_path / "out.partial" / "identity.json").write_text("{")
    with pytest.raises(ArtifactError, match="another recipe"):
        RunFolder(tmp_path / "out", RECIPE)


def test_one_that_only_noted_its_inputs_is_in_nobodys_way(tmp_path):
    RunFolder(tmp_path / "out", {**RECIPE, "domains": {"math": ["gsm8kk"]}})
    RunFolder(tmp_path / "out", {**RECIPE, "seed": 3}).require_same_inputs({"text": "a"})
    run = RunFolder(tmp_path / "out", RECIPE)
    run.require_same_inputs({"text": "b"})
    assert run.journal.unit_names() == ["inputs"]


@pytest.mark.parametrize(
    ("units", "refused", "left"),
    [
        ((), False, False),
        (("inputs",), False, False),
        (("inputs", "features|math"), False, True),
        (("inputs", "features|math"), True, False),
        (("inputs", "features|math", "score|math"), True, True),
    ],
)
def test_what_is_left_of_a_run_that_did_not_end(units, refused, left, tmp_path):
    run = RunFolder(tmp_path / "out", RECIPE)
    for unit in units:
        run.journal.run_unit(unit, lambda: 1)
    run.discard_if_idle(refused)
    assert (tmp_path / "out.partial").exists() is left


def test_overwrite_replaces_when_all_is_written_and_nothing_else_does(tmp_path):
    artefact(tmp_path / "out")
    with pytest.raises(ArtifactError, match=r"exists already.*--overwrite"):
        RunFolder(tmp_path / "out", RECIPE)
    # What is drawn of a result goes with its artefact.
    for name in ("report.html", ".report.html.lock", "plans.svg", "journal.jsonl"):
        (tmp_path / "out" / name).write_text("x")
    run = started(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "content").read_text() == "old"
    write_atomic(run.partial / "content", b"new")
    run.publish_folder()
    assert (tmp_path / "out" / "content").read_text() == "new"
    assert inside(tmp_path) == ["out"]
    assert inside(tmp_path / "out") == ["content"]
    (tmp_path / "empty").mkdir()
    assert started(tmp_path / "empty").publish_folder() == tmp_path / "empty"


def test_overwrite_never_deletes_what_freemoe_did_not_write(tmp_path):
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter").write_text("years of work")
    with pytest.raises(ArtifactError, match=r"is not an artefact of freemoe.*not replaced"):
        RunFolder(mine, RECIPE, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="is not an artefact of freemoe"):
        RunFolder(tmp_path / "file", RECIPE, overwrite=True)
    assert (mine / "chapter").read_text() == "years of work"
    assert inside(tmp_path) == ["file", "thesis"]


@pytest.mark.parametrize("name", ["notes.md", "runs/notes.md", ".hidden", "link"])
def test_a_file_of_the_users_inside_an_artefact_stops_the_run_that_would_replace_it(tmp_path, name):
    mine = artefact(tmp_path / "out") / name
    run = started(tmp_path / "out", overwrite=True)
    write_atomic(run.partial / "content", b"new")
    mine.parent.mkdir(exist_ok=True)
    mine.symlink_to(tmp_path) if name == "link" else mine.write_text("years of work")
    with pytest.raises(ArtifactError, match=f"holds '{name}', which its manifest does not name"):
        run.publish_folder()
    run._release_claim()
    with pytest.raises(ArtifactError, match=f"holds '{name}'.*it would be deleted"):
        RunFolder(tmp_path / "out", RECIPE, overwrite=True)
    assert mine.is_symlink() or mine.read_text() == "years of work"
    assert (tmp_path / "out" / "content").read_text() == "old"
    mine.unlink()
    started(tmp_path / "out", overwrite=True).publish_folder()
    assert (tmp_path / "out" / "content").read_text() == "new"


def test_neighbours_with_like_names_stay(tmp_path):
    artefact(tmp_path / "out")
    artefact(tmp_path / "out.old", "mine")
    started(tmp_path / "out", overwrite=True).publish_folder()
    assert (tmp_path / "out.old" / "content").read_text() == "mine"
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "mine").write_text("x")
    for options in ({}, {"resume": False}, {"overwrite": True}):
        with pytest.raises(ArtifactError, match="is not an unfinished run"):
            RunFolder(tmp_path / "other", RECIPE, **options)
    assert (tmp_path / "other.partial" / "mine").exists()


def test_killed_before_the_first_file_was_whole(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "identity.json.tmp").write_text('{"comm')
    assert started(tmp_path / "out").publish_folder() == tmp_path / "out"


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path):
    run = started(tmp_path / "out")
    artefact(tmp_path / "out")
    with pytest.raises(ArtifactError, match="exists already"):
        run.publish_folder()
    assert (tmp_path / "out" / "content").read_text() == "old"
    assert (tmp_path / "out.partial").exists()


def test_a_failed_publishing_puts_the_old_folder_back(tmp_path, monkeypatch):
    artefact(tmp_path / "out")
    run = started(tmp_path / "out", overwrite=True)
    real = Path.rename

    def rename(self, target):
        return full_disk() if self == run.partial else real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ArtifactError, match="The disk is full"):
        run.publish_folder()
    assert (tmp_path / "out" / "content").read_text() == "old"
    assert inside(tmp_path) == ["out", "out.partial"]


@pytest.mark.parametrize("output", ["", ".", "..", "/"])
def test_an_output_that_names_no_folder(output, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ArtifactError, match="names no new folder"):
        RunFolder(output, RECIPE, overwrite=True)


def test_an_output_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="could not be written: Not a directory"):
        RunFolder(tmp_path / "file" / "out", RECIPE)
    monkeypatch.setattr(Path, "mkdir", full_disk)
    with pytest.raises(ArtifactError, match="The disk is full"):
        RunFolder(tmp_path / "new", RECIPE)


def test_tensors_come_back_bit_equal(tmp_path):
    made = {"a": torch.tensor([0.1, float("nan")]), "b": torch.arange(6).reshape(2, 3).T}
    run = RunFolder(tmp_path / "out", RECIPE)
    first = run.run_tensor_unit("t", lambda: made)
    second = RunFolder(tmp_path / "out", RECIPE).run_tensor_unit("t", never)
    for found in (first, second):
        assert torch.equal(found["a"].view(torch.int32), made["a"].view(torch.int32))
        assert torch.equal(found["b"], made["b"])


@pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-1])])
def test_lost_or_damaged_tensors_are_made_again_and_must_be_the_same(harm, tmp_path):
    RunFolder(tmp_path / "out", RECIPE).run_tensor_unit("t", lambda: {"a": torch.ones(3)})
    (file,) = (tmp_path / "out.partial" / "units").iterdir()
    harm(file)
    again = RunFolder(tmp_path / "out", RECIPE)
    assert torch.equal(again.run_tensor_unit("t", lambda: {"a": torch.ones(3)})["a"], torch.ones(3))
    harm(file)
    with pytest.raises(ArtifactError, match=r"another result. Start over with --no-resume"):
        RunFolder(tmp_path / "out", RECIPE).run_tensor_unit("t", lambda: {"a": torch.zeros(3)})


@pytest.fixture
def running(tmp_path):
    """Another process that is at work on the folder ``out``, until the test kills it."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            RunFolder(tmp_path / "out", {"command": "build"}).journal.run_unit("u", lambda: 1)
            os.write(write, b"began")
            time.sleep(60)
        os._exit(1)
    assert os.read(read, 5) == b"began"
    return child


@pytest.mark.parametrize("options", [{}, {"resume": False}, {"overwrite": True}])
def test_a_folder_that_another_process_writes_is_refused(options, running, tmp_path):
    before, began = sorted(str(p) for p in tmp_path.rglob("*")), time.monotonic()
    with pytest.raises(ArtifactError, match=rf"being written by another run \(process {running}\)"):
        RunFolder(tmp_path / "out", {"command": "build"}, **options)
    assert time.monotonic() - began < 1
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
    # Killed, it is in nobody's way, and what it finished is not done again.
    os.kill(running, signal.SIGKILL)
    os.waitpid(running, 0)
    run = RunFolder(tmp_path / "out", {"command": "build"}, **options)
    assert ("u" in run.journal) is options.get("resume", True)
    folder = run.publish_folder()
    assert not (folder / run_folder.RUNNING).exists()


def test_the_environment_tells_versions_and_nothing_private():
    found = describe_environment()
    assert found["packages"]["torch"] == torch.__version__
    assert found["cores"] >= 1
    text = json.dumps(found)
    assert str(Path.home()) not in text
    assert os.uname().nodename not in text
    assert peak_memory_bytes() > 2**20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak of a process alone")
def test_the_peak_of_a_process_is_its_own():
    held = bytearray(b"x") * 2**29
    asked = [sys.executable, "-c", "from freemoe.core.memory import peak_memory_bytes; print(peak_memory_bytes())"]
    child = int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    assert child < len(held) <= peak_memory_bytes()
