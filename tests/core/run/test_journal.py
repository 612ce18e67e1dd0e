"""Writing a file whole or not at all, and the journal of finished units."""

import errno
import os
from pathlib import Path

import pytest

from freemoe.core.errors import ArtifactError
from freemoe.core.files import json_digest, write_atomic
from freemoe.core.run.journal import RunJournal


def never():
    raise AssertionError("this unit was finished before and must not be done again")


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def inside(folder):
    """Names of what a folder holds."""
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("fails", ["fsync", "open", "replace"])
def test_a_full_disk_leaves_the_old_file(fails, tmp_path, monkeypatch):
    write_atomic(tmp_path / "a", b"old")
    monkeypatch.setattr(*((os, "fsync") if fails == "fsync" else (Path, fails)), full_disk)
    with pytest.raises(ArtifactError, match=r"The disk is full: .*finished work is kept"):
        write_atomic(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert inside(tmp_path) == ["a"]
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert inside(tmp_path) == ["a"]


def test_digest_depends_on_content_not_on_order():
    assert json_digest({"a": 1, "b": [2, float("nan")]}) == json_digest({"b": [2, float("nan")], "a": 1})
    assert json_digest([1, 2]) != json_digest([2, 1])
    assert len(json_digest("\ud800")) == 16  # half a character, as a broken file may hold


VALUES = [
    None,
    True,
    0.1 + 0.2,
    -1e-300,
    [1, "two", [3.5]],
    {"nested": {"deep": [None]}},
    'ü\n"quoted"',
    float("inf"),
    float("-inf"),
    float("nan"),
]


def test_a_resumed_journal_gives_identical_values(tmp_path):
    first = RunJournal(tmp_path / "j")
    given = [first.run_unit(f"unit {i}", lambda v=v: v) for i, v in enumerate(VALUES)]
    assert (first.done, first.reused) == (len(VALUES), 0)
    second = RunJournal(tmp_path / "j")
    again = [second.run_unit(f"unit {i}", never) for i in range(len(VALUES))]
    assert repr(again) == repr(given) == repr(VALUES)  # NaN is not equal to itself
    assert (second.done, second.reused) == (0, len(VALUES))
    assert "unit 0" in second
    assert "unit 99" not in second


def test_an_unbroken_run_sees_what_a_resumed_one_sees(tmp_path):
    value = RunJournal(tmp_path / "j").run_unit("u", lambda: {"pair": (1, 2), 3: "three"})
    assert value == {"pair": [1, 2], "3": "three"} == RunJournal(tmp_path / "j").run_unit("u", never)


def three_units(path):
    journal = RunJournal(path)
    for name in "abc":
        journal.run_unit(name, lambda name=name: f"value of {name}")
    return path.read_bytes().splitlines(keepends=True)


def test_a_torn_last_line_is_dropped_wherever_it_is_torn(tmp_path, caplog):
    path = tmp_path / "j"
    lines = three_units(path)
    for cut in range(1, len(lines[2])):
        path.write_bytes(lines[0] + lines[1] + lines[2][:cut])
        journal = RunJournal(path)
        assert "b" in journal, cut
        assert "c" not in journal, cut
        assert path.read_bytes() == lines[0] + lines[1], cut
        journal.run_unit("c", lambda: "value of c")
        assert path.read_bytes() == b"".join(lines), cut
    assert "done again" in caplog.text
    caplog.clear()
    RunJournal(path)
    assert not caplog.records
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace(b"value of b", b"value of x"),
        lambda line: line.replace(b'"b"', b'"x"', 1),
        lambda line: b"\x00" * (len(line) - 1) + b"\n",
        lambda line: b"[]\n",
        lambda line: b"{}\n",
        lambda line: b"\n",
    ],
    ids=["value", "unit", "zeros", "list", "empty", "blank"],
)
def test_what_stands_behind_a_damaged_line_does_not_count(damage, tmp_path):
    path = tmp_path / "j"
    lines = three_units(path)
    path.write_bytes(lines[0] + damage(lines[1]) + lines[2])
    journal = RunJournal(path)
    assert ["a" in journal, "b" in journal, "c" in journal] == [True, False, False]
    assert path.read_bytes() == lines[0]


def test_failed_work_leaves_no_line(tmp_path):
    journal = RunJournal(tmp_path / "j")
    with pytest.raises(ZeroDivisionError):
        journal.run_unit("u", lambda: 1 / 0)
    assert "u" not in RunJournal(tmp_path / "j")
    assert journal.run_unit("u", lambda: 1) == 1
