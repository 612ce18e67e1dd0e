"""What bubblewrap is told, and what keeps programs from memory that nothing counts."""

import platform
import struct
import sys

import pytest

from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox import bubblewrap
from freemoe.evals.sandbox.bubblewrap import (
    DISK,
    FOLDER,
    find_bwrap,
    isolated_command,
    readable_paths,
    refuse_uncounted_memory,
)
from freemoe.evals.sandbox.runner import require_permission, run_tests


def test_what_may_be_read(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    paths = readable_paths.__wrapped__()
    assert "/" not in paths
    assert str(tmp_path) not in paths, "the folder of the user's script is no library"
    assert any(sys.prefix == p or sys.prefix.startswith(f"{p}/") for p in paths)
    assert not [p for p in paths for q in paths if p != q and p.startswith(f"{q}/")]
    assert not {"/etc", "/home", "/root", "/proc", "/tmp"} & set(paths)


def test_bubblewrap_is_told_sizes_and_no_writable_place_but_the_folder():
    words = isolated_command("bwrap", "--seccomp", "9")
    assert (words[0], words[-1]) == ("bwrap", "--")
    assert not {"--bind", "--dev-bind", "--share-net", "--proc"} & set(words)
    place = words.index("--tmpfs", words.index("/dev/shm"))
    assert words[place - 2 : place + 2] == ["--size", str(DISK), "--tmpfs", FOLDER]
    assert [words[n + 1] for n, w in enumerate(words) if w == "--remount-ro"] == ["/dev", "/"]
    assert {"--unshare-all", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"} <= set(words)


@pytest.mark.parametrize(
    ("machine", "architecture", "number", "allowed"),
    [
        ("x86_64", 0xC000003E, 29, False),
        ("x86_64", 0xC000003E, 319, False),
        ("x86_64", 0xC000003E, 447, False),
        ("x86_64", 0xC000003E, 0, True),
        ("x86_64", 0xC000003E, 0x40000000 | 1, False),
        ("x86_64", 0x40000003, 1, False),
        ("aarch64", 0xC00000B7, 194, False),
        ("aarch64", 0xC00000B7, 29, True),
    ],
)
def test_calls_for_memory_that_nothing_counts(monkeypatch, machine, architecture, number, allowed):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    steps = list(struct.iter_unpack("=HBBI", refuse_uncounted_memory()))
    at, held = 0, 0
    while steps[at][0] != 0x06:  # run it as the kernel does
        code, then, otherwise, value = steps[at]
        at += 1
        if code == 0x20:
            held = {0: number, 4: architecture}[value]
        else:
            at += then if {0x15: held == value, 0x35: held >= value}[code] else otherwise
    assert (steps[at][3] == 0x7FFF0000) == allowed


def test_an_unknown_machine_has_no_filter(monkeypatch):
    monkeypatch.setattr(bubblewrap.platform, "machine", lambda: "riscv64")
    assert refuse_uncounted_memory() == b""


@pytest.mark.parametrize(
    ("script", "why"),
    [(None, "there is no bwrap on the PATH"), ("echo no namespaces >&2; exit 7", "status 7: no namespaces")],
)
def test_where_bubblewrap_does_not_start_nothing_is_run(tmp_path, monkeypatch, script, why):
    if script:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    find_bwrap.cache_clear()
    try:
        with pytest.raises(SandboxError, match=rf"{why}.*apt-get install bubblewrap.*--allow-code-execution=unsafe"):
            require_permission(True)
        with pytest.raises(SandboxError, match=why):
            run_tests("pass")
        assert require_permission("unsafe") == "none"
    finally:
        find_bwrap.cache_clear()
