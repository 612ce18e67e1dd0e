"""The last handler: whatever happens, no traceback on the terminal; what is a fault of freemoe is kept for a report."""

import errno
import io
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from freemoe.cli import failures
from freemoe.core.files import cache_folder
from tests.cli.conftest import document

ROWS = "freemoe.cli.listing._listing_rows"


def breaks(monkeypatch, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(ROWS, broken)


def kept():
    return sorted(cache_folder().glob("fault-*.txt"))


def test_a_fault_is_told_and_its_traceback_kept(freemoe, monkeypatch):
    breaks(monkeypatch, ZeroDivisionError("a \x1b[2J b\nmore"))
    monkeypatch.setattr(failures, "report_page", lambda: "https://example.org/issues")
    done = freemoe("ls", "--json", faults=True)
    assert done.code == 70
    assert "Traceback" not in done.err
    assert done.err.count("\n") == 1
    assert done.err.startswith("error: this is a fault of freemoe, not of yours (ZeroDivisionError: a \\x1b[2J b)")
    assert "https://example.org/issues" in done.err
    [file] = kept()
    assert str(file) in done.err
    text = file.read_text(encoding="utf-8")
    for part in ("freemoe ls --json", "torch ", "Python 3", "Traceback (most recent call last)", "in broken"):
        assert part in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = document(done, "error")
    assert (found["kind"], found["exit_code"]) == ("ZeroDivisionError", 70)


@pytest.mark.parametrize(("temporary", "told"), [("file", "could not be written"), (".", "The traceback stands in ")])
def test_a_cache_that_is_closed_gives_way_to_the_temporary_folder(temporary, told, freemoe, monkeypatch, tmp_path):
    breaks(monkeypatch, TypeError())
    (tmp_path / "file").touch()
    monkeypatch.setenv("FREEMOE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / temporary))
    done = freemoe("ls", faults=True)
    assert (done.code, "(TypeError)" in done.err, told in done.err) == (70, True, True)
    assert len(list(tmp_path.glob("fault-*.txt"))) == (temporary == ".")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "'a/b': Permission denied. Check that it is there"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000), "File name too long"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x\x1b[0m"), "'x\\x1b[0m': Is a directory"),
        (RuntimeError("Symlink loop from '/a/b'"), "Symlink loop from '/a/b'. Check the names"),
        (RuntimeError("Could not determine home directory."), "Check the names of files"),
        (ValueError("embedded null byte"), "embedded null byte. Check the names"),
        (MemoryError(), "not enough memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: x"),
            "--dtype bfloat16",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "not enough memory"),
    ],
)
def test_what_the_system_refuses_is_no_fault(error, words, freemoe, monkeypatch):
    breaks(monkeypatch, error)
    assert len(freemoe("ls").refused(words).err) < 500
    assert kept() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(5), SystemExit("words")])
def test_other_ends(error, freemoe, monkeypatch):
    breaks(monkeypatch, error)
    done = freemoe("ls")
    assert done.code == {"KeyboardInterrupt": 130, "SystemExit": 5 if error.args == (5,) else 1}[type(error).__name__]
    assert "Traceback" not in done.err


@pytest.mark.parametrize("arguments", [["generate", "m", "\udcff"], ["inspect", "a\udc80"], ["ls", "\0"]])
def test_arguments_that_are_no_text(arguments, freemoe):
    freemoe(*arguments).refused(f"error: Argument {len(arguments)}, {arguments[-1]!r}, is not UTF-8")


def test_a_terminal_of_ascii_alone(freemoe, monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stderr", narrow)
    freemoe("inspect", "wörter–漢")
    narrow.seek(0)
    assert "w\\xf6rter\\u2013\\u6f22" in narrow.read()


def test_the_page_of_reports_is_the_packages_own(monkeypatch):
    def told(*lines):
        class Told:
            def get_all(self, name):
                assert name == "Project-URL"
                return list(lines) or None

        return lambda name: Told()

    monkeypatch.setattr(
        failures.metadata, "metadata", told("Homepage, https://a.example", "Bug Tracker, https://b.example")
    )
    assert failures.report_page() == "at https://b.example"
    monkeypatch.setattr(failures.metadata, "metadata", told("Homepage, https://a.example"))
    assert failures.report_page() == "at https://a.example"
    monkeypatch.setattr(failures.metadata, "metadata", told())
    assert failures.report_page() == "to those that you have freemoe from"


def test_a_reader_that_goes_away():
    line = f"{sys.executable} -m freemoe ls --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_exit_codes_are_documented():
    page = Path(__file__).parents[2].joinpath("docs", "cli.md").read_text(encoding="utf-8")
    for code in (failures.REFUSED, failures.FAULT, failures.STOPPED, failures.UNHEARD):
        assert re.search(rf"^\| {code} \|", page, re.MULTILINE), code


def test_json_is_safe_on_a_terminal(freemoe):
    name = "a\u202e\x9b31m"
    done = freemoe("inspect", name, "--json")
    assert repr(name) in document(done, "error")["error"]
    for stream in (done.out, done.err):
        assert "\u202e" not in stream
        assert "\x9b" not in stream
    assert os.linesep in done.out


@pytest.mark.parametrize(
    "result",
    [
        {"kind": "evaluation"},
        {"kind": "evaluation", "recipe": 5, "domains": [1], "environment": []},
        {"kind": "evaluation", "recipe": {}, "domains": [{"name": "a", "rows": {}}], "environment": {}},
        {"kind": ["evaluation"], "format": 1},
        {"kind": "evaluation", "recipe": {}, "domains": {"a": None}, "environment": {}, "average": []},
    ],
)
def test_a_result_that_was_edited(result, freemoe, tmp_path):
    (tmp_path / "scores.json").write_text(json.dumps(result))
    freemoe("report", str(tmp_path / "scores.json")).refused("error: ")


@pytest.mark.parametrize("name", ["", ".", "/", "x" * 300, "x/" * 3000, "~nosuchuser/x", "loop", "fifo", "/dev/null"])
@pytest.mark.parametrize("line", ["report {}", "inspect {}", "run {}", "eval freemoe-demo -d a={}.jsonl --dry-run"])
def test_names_that_lead_nowhere(line, name, freemoe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for end in ("", ".jsonl"):
        (tmp_path / f"loop{end}").symlink_to(f"loop{end}")
        os.mkfifo(tmp_path / f"fifo{end}")
    assert len(freemoe(*(part.replace("{}", name) for part in line.split())).refused().err) < 20_200


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "a pipe or a device"),
        (lambda path: path.write_text("a: &a [x]\nb: [*a, *a]\n"), "anchors and aliases"),
        (lambda path: path.write_text("a: " + "[" * 100), "deep"),
        (lambda path: path.write_text("x" * 2**19), "512.0 KiB, and at most 256.0 KiB"),
    ],
)
def test_a_folder_of_tasks_that_another_library_reads(make, words, freemoe, tmp_path):
    (tmp_path / "good.yaml").write_text("task: mine\nprocess_docs: !function utils.f\n")
    make(tmp_path / "odd.yaml")
    freemoe("eval", "freemoe-demo", "-d", "a=lm_eval:mine", "--task-folder", str(tmp_path), "--dry-run").refused(words)
