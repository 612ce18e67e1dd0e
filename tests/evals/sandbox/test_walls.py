"""The walls as data: what a filter of calls answers, what Landlock is asked for, what bubblewrap is told."""

from __future__ import annotations

import sys

import pytest

from freemoe.evals.sandbox.walls import DISK, landlock, seccomp
from freemoe.evals.sandbox.walls.bubblewrap import command
from freemoe.evals.sandbox.walls.kernel import Refused
from freemoe.evals.sandbox.walls.reads import readable
from freemoe.evals.sandbox.walls.syscalls import (
    CLONE_THREAD,
    F_SETOWN,
    IGNORE,
    MACHINES,
    NONE,
    NUMBERS,
    RULES,
    TIOCSTI,
)

OWN = 4321
REFUSED, ABSENT = seccomp.ANSWER | 1, seccomp.ANSWER | 38


def answer(
    call: str | int,
    *arguments: int,
    machine: str = "x86_64",
    processes: bool = False,
    tree: bool = False,
    architecture: int | None = None,
) -> int:
    """What the kernel would make of a call, by running the filter as the kernel does."""
    place, named = MACHINES[machine]
    number = NUMBERS[call][place] if isinstance(call, str) else call
    data = {seccomp.NUMBER: number, seccomp.ARCHITECTURE: architecture or named}
    data |= {seccomp.ARGUMENTS + 8 * n: value for n, value in enumerate(arguments)}
    steps, at, held = seccomp.program(machine, OWN, processes, tree), 0, 0
    while True:
        code, then, otherwise, value = steps[at]
        at += 1
        if code == seccomp.RETURN:
            return value
        if code == seccomp.LOAD:
            held = data.get(value, 0)
        else:
            met = {
                seccomp.EQUAL: held == value,
                seccomp.AT_LEAST: held >= value,
                seccomp.ANY_BIT: bool(held & value),
            }[code]
            at += then if met else otherwise


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        ("socket", (1, 1, 0), REFUSED),
        ("socketpair", (1,), seccomp.ALLOW),
        ("socketpair", (2,), REFUSED),
        ("ptrace", (16, 1), REFUSED),
        ("kill", (OWN, 9), seccomp.ALLOW),
        ("kill", (OWN + 1, 9), REFUSED),
        ("kill", (0, 9), REFUSED),
        ("tgkill", (OWN, 99, 9), seccomp.ALLOW),
        ("clone", (CLONE_THREAD | 0x100,), seccomp.ALLOW),
        ("clone", (17,), REFUSED),
        ("clone", (CLONE_THREAD | 0x10000000,), REFUSED),
        ("clone3", (), ABSENT),
        ("mount", (), REFUSED),
        ("execve", (), REFUSED),
        ("prlimit64", (0, 7), seccomp.ALLOW),
        ("prlimit64", (OWN, 7), seccomp.ALLOW),
        ("prlimit64", (1, 7), REFUSED),
        ("fcntl", (3, 1), seccomp.ALLOW),
        ("fcntl", (3, F_SETOWN), REFUSED),
        ("ioctl", (0, TIOCSTI), REFUSED),
        ("ioctl", (0, 0x5401), seccomp.ALLOW),
        ("prctl", (1, 0), REFUSED),
        ("prctl", (15, 0), seccomp.ALLOW),
        ("fchmod", (3, 0), seccomp.ANSWER | IGNORE),
        ("memfd_create", (), REFUSED),
        (0, (), seccomp.ALLOW),
    ],
)
def test_what_the_filter_answers(machine: str, call: str | int, arguments: tuple[int, ...], expected: int) -> None:
    assert answer(call, *arguments, machine=machine) == expected


def test_what_depends_on_the_other_walls() -> None:
    for call, arguments in (("kill", (1, 9)), ("clone", (17,)), ("setsid", ()), ("sched_setaffinity", (1,))):
        assert answer(call, *arguments) == REFUSED
        assert answer(call, *arguments, processes=True) == seccomp.ALLOW
    assert answer("clone", 0x10000000, processes=True, tree=True) == REFUSED
    assert answer("fchmod", tree=True) == seccomp.ALLOW
    assert answer("setxattr", tree=False) == REFUSED


def test_other_numbers_of_the_same_machine_end_the_process() -> None:
    assert answer("getpid" if "getpid" in NUMBERS else 39 | seccomp.X32) == seccomp.KILL
    assert answer(1, architecture=0x40000003) == seccomp.KILL
    with pytest.raises(Refused, match="riscv64 are not known here, those of x86_64, aarch64 are"):
        seccomp.program("riscv64", OWN, False, False)


def test_the_table_of_calls_is_whole() -> None:
    asked = {name for *_, calls in RULES for name in calls.split()}
    assert asked == set(NUMBERS)
    for place in (0, 1):
        numbers = [pair[place] for pair in NUMBERS.values() if pair[place] != NONE]
        assert len(numbers) == len(set(numbers))
    # The kernel's own numbers, which every machine has had alike since 424.
    assert all(a == b for a, b in NUMBERS.values() if a >= 424)


def test_landlock_asks_for_what_its_version_knows() -> None:
    assert landlock.bits(list(landlock.RIGHTS), 1) == (1 << 13) - 1
    assert landlock.bits(list(landlock.RIGHTS), 2) == (1 << 14) - 1
    assert landlock.bits(list(landlock.RIGHTS), 9) == (1 << 16) - 1
    granted = {name for name, (_, _, granted) in landlock.RIGHTS.items() if granted}
    assert not granted & {"execute", "make_sock", "make_fifo", "make_char", "make_block", "ioctl_dev"}


def test_what_may_be_read() -> None:
    found = readable([*sys.path, "/not/there", ""])
    assert "/not/there" not in found
    assert "/" not in found
    assert any(sys.prefix == p or sys.prefix.startswith(f"{p}/") for p in found)
    assert not [p for p in found for q in found if p != q and p.startswith(f"{q}/")]
    assert not {"/etc", "/home", "/root", "/proc", "/tmp"} & set(found)


def test_bubblewrap_is_told_sizes_and_no_writable_place_but_the_folder() -> None:
    words = command("bwrap", "/private", ["/usr/lib", "/opt/python"])
    assert words[0] == "bwrap"
    assert words[-1] == "--"
    assert "--bind" not in words
    assert words.count("--ro-bind") == 2
    place = words.index("/private")
    assert words[place - 3 : place] == ["--size", str(DISK), "--tmpfs"]
    assert [words[n + 1] for n, w in enumerate(words) if w == "--remount-ro"] == ["/dev", "/"]
    assert {"--unshare-all", "--die-with-parent"} <= set(words)
