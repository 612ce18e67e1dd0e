"""Generated programs, run with their tests in a process of their own: walled in, limited, ended as a whole.

What a program gets: an interpreter in isolated mode (``python -I``) in a private, empty folder that is deleted afterwards; an
environment with nothing of the caller's; no standard input; output that goes nowhere; limits on CPU time, wall clock, memory,
files and processes, of each process and of all together. What stands around it, one room of `freemoe.evals.sandbox.walls` each:

- ``namespaces``: no network, no sight of other processes, and a read-only file tree that holds the interpreter and its libraries
  alone; the private folder is a tmpfs of limited size. Processes of its own are allowed inside.
- ``bubblewrap``: the same by ``bwrap``, where the kernel keeps namespaces from us and not from it.
- ``landlock``: writes in the private folder only, reads where they must be, no TCP, no signals to others, no other programs.
- ``seccomp``: no sockets (but pairs of its own), no ptrace, no signals to others, no mounts, no new namespaces, and the rest of
  `freemoe.evals.sandbox.walls.syscalls`.
- ``privileges``: no capability, none to be won (``no_new_privs``), no look into its memory from beside it.

All that the kernel gives are raised; `Result.walls` names them. One that keeps files (the first three) must stand, or nothing is
run, unless the user says ``unsafe``. Inside stands an audit hook too, a fence against what models write by chance.

What this does **not** protect from. It is no virtual machine: a hole in the kernel is a hole in every wall, and time that a
program takes, heat and caches can be felt outside. The program can *read* its interpreter and installed packages. Its tests run
in its own interpreter, as HumanEval has it: objects that say they are equal to everything pass, and so can a program that
rewrites the memory of its interpreter (by ``ctypes``, or bytecode made by hand).
"""

from __future__ import annotations

import math
import os
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox.process import Ended, run_inside
from freemoe.evals.sandbox.walls.bubblewrap import found

MEMORY = 2 << 30
WALL = 3.0
"""Wall clock per second of CPU time: a busy machine must not fail a program that another one passes."""
GRACE = 2.0
"""Seconds beyond the program's own for starting the interpreter, before all of it is ended."""

WALLS = ("namespaces", "landlock", "seccomp")
"""Walls that are asked for; ``privileges`` always is."""

PASS_AT = (1, 10, 100)
"""The k of every pass@k that is reported, as far as there are samples."""

Permission = bool | Literal["unsafe"]
"""Whether generated code may be run: behind walls only, or ``unsafe``: without any too."""
Status = Literal["passed", "failed", "timeout", "exited", "killed"]


@dataclass(frozen=True)
class Result:
    """How a program ended.

    Attributes:
        passed: Whether it ran to its end, tests included, without an exception.
        status: ``passed``; ``failed`` (an exception); ``timeout``; ``exited`` (it ended itself before its
            tests were through, with whatever exit status); ``killed`` (by a signal: a limit, or a crash).
        detail: The exception, the signal, or what was used too much of.
        walls: Which walls stood around it.
        absent: Wall that was asked for and did not stand -> why.
    """

    passed: bool
    status: Status
    detail: str
    walls: tuple[str, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()

    @property
    def isolated(self) -> bool:
        """Whether it had namespaces of its own: no network, no process left behind, no file of the user's in sight."""
        return "namespaces" in self.walls or "bubblewrap" in self.walls


def require_permission(allowed: Permission) -> None:
    """Raise unless the user said that generated code may be run, and there is something to run it behind.

    Raises:
        SandboxError: With what to do.
    """
    if not allowed:
        raise SandboxError(
            "This task runs programs that a language model wrote. Say --allow-code-execution (Python: "
            "allow_code_execution=True) to have them run in freemoe's sandbox; what it does not protect "
            "from stands in the docstring of freemoe.evals.sandbox.runner. Otherwise leave the code tasks out."
        )
    if allowed != "unsafe":
        _require_walls()


@lru_cache(maxsize=1)
def _require_walls() -> None:
    run_tests("pass")


@lru_cache(maxsize=1)
def walls_here() -> tuple[str, ...]:
    """The walls to ask for here: bubblewrap where it is installed and the kernel keeps namespaces from us."""
    if "namespaces" in run_tests("pass", walls=WALLS, unsafe=True).walls or not found():
        return WALLS
    asked = ("bubblewrap", *WALLS[1:])
    try:
        run_tests("pass", walls=asked)
    except SandboxError:
        return WALLS  # it is there, and may not have namespaces either
    return asked


def run_tests(
    program: str,
    *,
    timeout: float = 3.0,
    memory: int = MEMORY,
    walls: Sequence[str] | None = None,
    unsafe: bool = False,
) -> Result:
    """Run one program, tests included; it passes iff it runs to its end without an exception.

    Args:
        program: Python source: the candidate followed by its tests.
        timeout: Seconds of CPU time for the program itself; it gets three times that of wall clock.
        memory: Bytes of address space of each of its processes, and of memory of all together.
        walls: Walls to raise, of `WALLS` and ``bubblewrap``; what the kernel refuses is left out. All there are if absent.
        unsafe: Run it even where no wall stands that keeps files.

    Raises:
        SandboxError: When there is no sandbox on this system, no wall stands, or it cannot start.
    """
    if os.name != "posix":
        raise SandboxError(f"Generated code is run on POSIX systems only (Linux, macOS), not on {os.name!r}.")
    if not timeout > 0:
        raise SandboxError(f"timeout is {timeout!r}; it must be a number of seconds above 0.")
    asked = walls_here() if walls is None else tuple(walls)
    if unknown := set(asked) - {*WALLS, "bubblewrap"}:
        raise SandboxError(f"There is no wall {sorted(unknown)[0]!r}; there are {', '.join(WALLS)} and bubblewrap.")
    word = f"{secrets.token_hex(16)} passed\n"
    wall = timeout * WALL
    arguments = [repr(timeout), repr(wall), str(memory), ",".join(asked), str(int(unsafe))]
    return _judge(run_inside(f"{word}{program}", arguments, asked, wall + GRACE, memory), word, timeout)


def _judge(ended: Ended, word: str, timeout: float) -> Result:
    """What the child's exit status and its words amount to."""
    ours, begun, rest = ended.words.partition("\ngo\n")
    header = ours.split("\n")
    absent = tuple(_halves(line.removeprefix("absent ")) for line in header if line.startswith("absent "))
    if "refused" in header and not begun:
        reasons = "; ".join(f"{name}: {why}" for name, why in absent) or "none was asked for"
        raise SandboxError(
            f"No wall stands here that would keep generated programs from your files ({reasons}), so none is run. Run freemoe "
            "where the kernel has Landlock or user namespaces (Linux from 5.13), or install bubblewrap. In a container without "
            "anything to lose, say --allow-code-execution=unsafe."
        )
    if not begun and ended.why != "time":
        raise SandboxError(
            f"The sandbox did not come up (exit status {ended.code}); the program was not run. Is there memory left, and a "
            "temporary folder to write in?"
        )
    walls = tuple(header[0].removeprefix("walls ").split(",")) if begun and header[0] != "walls " else ()
    lines = rest.split("\n")
    said = next((line for line in reversed(lines) if line == "timeout" or line.startswith("failed ")), "")
    printable = "".join(c if c.isprintable() else " " for c in said)
    status, detail = _ending(ended, word.strip() in lines, printable, timeout)
    return Result(status == "passed", status, detail, walls, absent)


def _halves(line: str) -> tuple[str, str]:
    name, _, why = line.partition(": ")
    return name, why


def _ending(ended: Ended, passed: bool, said: str, timeout: float) -> tuple[Status, str]:
    code = ended.code
    if ended.why == "time" or (said == "timeout" and not passed):
        return "timeout", f"ran longer than {timeout:g} s"
    if code is None:
        return "killed", ended.why
    if passed and code == 0:
        return "passed", ""
    if said.startswith("failed "):
        return "failed", said.removeprefix("failed ")
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        return "killed", signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return "exited", f"ended with status {code} before its tests were through"


def passed_at(passed: Sequence[bool], k: int, estimator: str = "unbiased") -> float:
    """pass@k of one problem's samples, in the order in which they were drawn.

    Args:
        passed: Whether each sample passed its tests.
        k: How many one may try.
        estimator: ``unbiased``: the chance that one of k samples of these passes (Chen et al. 2021); ``first``: whether one
            of the first k did, as MoDE Eq. 12 counts.

    Raises:
        ValueError: Unless ``1 <= k <= len(passed)``.
    """
    counted = passed[:k] if estimator == "first" else passed
    return pass_at_k(len(counted), sum(counted), k)


def pass_at_k(n: int, c: int, k: int, *, unbiased: bool = True) -> float:
    """Chance that at least one of ``k`` samples passes, given that ``c`` of ``n`` did.

    Chen et al. 2021 (Evaluating Large Language Models Trained on Code), Eq. 1: ``1 - C(n-c, k) / C(n, k)``.
    ``unbiased=False`` is the papers' Eq. 12, where the samples drawn are the samples counted (n = k): 1 if
    any passed.

    Raises:
        ValueError: Unless ``0 <= c <= n`` and ``1 <= k <= n``.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k of n={n} samples, c={c} passing, k={k}: needs 0 <= c <= n and 1 <= k <= n.")
    if not unbiased:
        if n != k:
            raise ValueError(f"Eq. 12 counts all samples drawn: it needs n = k, got n={n}, k={k}.")
        return float(c > 0)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
