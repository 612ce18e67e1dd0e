"""Generated programs, run with their tests inside bubblewrap: isolated, limited, ended as a whole.

What a program gets: an interpreter in isolated mode (``python -I``) in a private, empty folder; an environment with nothing of
the caller's; no standard input; output that goes nowhere; limits on CPU time, wall clock, memory, files and processes, of each
process and of all together. Bubblewrap gives it namespaces of its own: no network, no sight of other processes, a read-only file
tree that holds the interpreter and its libraries alone, a folder and shared memory of limited size, no capability. Where it does
not start nothing is run, unless the user says ``unsafe``; `SandboxResult.isolation` says what stood.

What this does **not** protect from. It is no virtual machine: a hole in the kernel is a hole in the wall, and time that a
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
from typing import Literal

from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox.bubblewrap import find_bwrap
from freemoe.evals.sandbox.process import Isolation, ProcessOutcome, run_inside

MEMORY = 2 << 30
PASS_AT = (1, 10, 100)  # The k of every pass@k that is reported, as far as there are samples

Permission = bool | Literal["unsafe"]
"""Whether generated code may be run: inside bubblewrap only, or ``unsafe``: without it too, where it does not start."""
Status = Literal["passed", "failed", "timeout", "exited", "killed"]


@dataclass(frozen=True)
class SandboxResult:
    """How a program came to its end."""

    passed: bool  # Whether it ran to its end, tests included, without an exception
    # ``passed``; ``failed`` (an exception); ``timeout``; ``exited`` (it ended itself before its tests were through,
    # with whatever exit status); ``killed`` (by a signal: a limit, or a crash)
    status: Status
    detail: str  # The exception, the signal, or what was used too much of
    isolation: Isolation = "bubblewrap"  # What stood around it


def require_permission(allowed: Permission) -> Isolation:
    """What generated programs will run inside; raise unless the user said that they may be run, and there is such a thing.

    Raises:
        SandboxError: With what to do.
    """
    if not allowed:
        raise SandboxError(
            "This task runs programs that a language model wrote. Say --allow-code-execution (Python: "
            "allow_code_execution=True) to have them run in freemoe's sandbox; what it does not protect "
            "from stands in the docstring of freemoe.evals.sandbox.runner. Otherwise leave the code tasks out."
        )
    try:
        find_bwrap()
    except SandboxError:
        if allowed != "unsafe":
            raise
        return "none"
    return "bubblewrap"


def run_tests(
    program: str, *, timeout: float = 3.0, memory: int = MEMORY, isolation: Isolation = "bubblewrap"
) -> SandboxResult:
    """Run one program, tests included; it passes iff it runs to its end without an exception.

    ``program``: Python source: the candidate followed by its tests. ``timeout``: seconds of CPU time for the program
    itself, by default as many as the hub's ``code_eval`` gives of a shared clock; it gets three times that of wall clock.
    ``memory``: bytes of address space of each of its processes, and of memory of all together. ``isolation``: ``none``: as
    an ordinary process of this user, with the limits alone.

    Raises:
        SandboxError: When there is no sandbox on this system, or it cannot start.
    """
    if os.name != "posix":
        raise SandboxError(f"Generated code is run on POSIX systems only (Linux, macOS), not on {os.name!r}.")
    if not timeout > 0:
        raise SandboxError(f"timeout is {timeout!r}; it must be a number of seconds above 0.")
    word = f"{secrets.token_hex(16)} passed\n"
    ended = run_inside(f"{word}{program}", isolation, timeout, memory)
    status, detail = _read_verdict(ended, word, timeout)
    return SandboxResult(status == "passed", status, detail, isolation)


def _read_verdict(ended: ProcessOutcome, word: str, timeout: float) -> tuple[Status, str]:
    """What the child's exit status and its words amount to."""
    begun = ended.words.startswith("go\n")
    if not begun and ended.why != "time":
        raise SandboxError(
            f"The sandbox did not come up (exit status {ended.code}); the program was not run. Is there memory left, and a "
            "temporary folder to write in?"
        )
    lines = ended.words.split("\n")[1:]
    status = next((line for line in reversed(lines) if line == "timeout" or line.startswith("failed ")), "")
    status = "".join(c if c.isprintable() else " " for c in status)
    code, passed = ended.code, word.strip() in lines
    if ended.why == "time" or (status == "timeout" and not passed):
        return "timeout", f"ran longer than {timeout:g} s"
    if code is None:
        return "killed", ended.why
    if passed and code == 0:
        return "passed", ""
    if status.startswith("failed "):
        return "failed", status.removeprefix("failed ")
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        return "killed", signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return "exited", f"ended with status {code} before its tests were through"


def passed_at(passed: Sequence[bool], k: int, estimator: str = "unbiased") -> float:
    """pass@k of one problem's samples, in the order in which they were drawn.

    ``passed``: whether each sample passed its tests. ``estimator``: ``unbiased``: the chance that one of k samples of these
    passes (Chen et al. 2021); ``first``: whether one of the first k did, as MoDE Eq. 12 counts.

    Raises:
        ValueError: Unless ``1 <= k <= len(passed)``.
    """
    counted = passed[:k] if estimator == "first" else passed
    return pass_at_k(len(counted), sum(counted), k)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of ``k`` samples passes, given that ``c`` of ``n`` did.

    Chen et al. 2021 (Evaluating Large Language Models Trained on Code), Eq. 1: ``1 - C(n-c, k) / C(n, k)``.

    Raises:
        ValueError: Unless ``0 <= c <= n`` and ``1 <= k <= n``.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k of n={n} samples, c={c} passing, k={k}: needs 0 <= c <= n and 1 <= k <= n.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
