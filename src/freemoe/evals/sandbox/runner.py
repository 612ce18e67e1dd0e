"""Generated programs, run with their tests in a process of their own: limited, offline, killed as a group.

What a program gets: an interpreter in isolated mode (``python -I``) in a private, empty temporary directory
that is deleted afterwards; an environment with nothing of the caller's; no standard input; output that goes
nowhere; limits on CPU time, wall clock, address space, file size, open files and processes; on Linux,
where the kernel lets an ordinary user have them, a network namespace without any interface and a process
namespace that dies as a whole. An audit hook also refuses sockets, new processes, signals to other
processes, native libraries, and changes to files outside the private directory.

What this does **not** protect from. It is no virtual machine and no container: the program runs as the same
user on the same kernel and can *read* whatever that user can read. The audit hook is a fence against what
models write by chance, not a wall against an attacker: code in C (an extension module, ``ctypes.pythonapi``)
gets around it, and where the kernel refuses namespaces (`Result.isolated` is False) nothing but the hook
then stops the network and processes that leave the group. Limits are per process and per file, so a program
can still fill a disk with many small files. A program that hunts through its interpreter's frames for the
sandbox's token can forge a pass. Where that matters, run freemoe itself inside a container without secrets.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freemoe.core.errors import SandboxError

CHILD = Path(__file__).with_name("child.py")
MEMORY = 2 << 30
WALL = 3.0
"""Wall clock per second of CPU time: a busy machine must not fail a program that another one passes."""
GRACE = 2.0
"""Seconds beyond the program's own for starting the interpreter, before the whole group is killed."""
MESSAGE = 4096
"""Bytes of the child's last word that are read."""

PASS_AT = (1, 10, 100)
"""The k of every pass@k that is reported, as far as there are samples."""

Status = Literal["passed", "failed", "timeout", "exited", "killed"]


@dataclass(frozen=True)
class Result:
    """How a program ended.

    Attributes:
        passed: Whether it ran to its end, tests included, without an exception.
        status: ``passed``; ``failed`` (an exception); ``timeout``; ``exited`` (it ended itself before its
            tests were through, with whatever exit status); ``killed`` (by a signal: a limit, or a crash).
        detail: The exception or the signal.
        isolated: Whether the kernel gave it namespaces of its own (no network, no process left behind).
    """

    passed: bool
    status: Status
    detail: str
    isolated: bool = False


def require_permission(allowed: bool) -> None:
    """Raise unless the user said that generated code may be run.

    Raises:
        SandboxError: With what to do.
    """
    if not allowed:
        raise SandboxError(
            "This task runs programs that a language model wrote. Say --allow-code-execution (Python: "
            "allow_code_execution=True) to have them run in freemoe's sandbox; what it does not protect "
            "from stands in the docstring of freemoe.evals.sandbox.runner. Otherwise leave the code tasks out."
        )


def run_tests(program: str, *, timeout: float = 3.0, memory: int = MEMORY, namespaces: bool = True) -> Result:
    """Run one program, tests included; it passes iff it runs to its end without an exception.

    Args:
        program: Python source: the candidate followed by its tests.
        timeout: Seconds of CPU time for the program itself; it gets three times that of wall clock.
        memory: Bytes of address space.
        namespaces: Ask the kernel for namespaces of its own (done without where it refuses).

    Raises:
        SandboxError: When there is no sandbox on this system, or it cannot start.
    """
    if os.name != "posix":
        raise SandboxError(f"Generated code is run on POSIX systems only (Linux, macOS), not on {os.name!r}.")
    if not timeout > 0:
        raise SandboxError(f"timeout is {timeout!r}; it must be a number of seconds above 0.")
    token = secrets.token_hex(16)
    wall = timeout * WALL
    arguments = [repr(timeout), repr(wall), str(memory), str(int(namespaces))]
    with tempfile.TemporaryDirectory(prefix="freemoe-sandbox-", ignore_cleanup_errors=True) as folder:
        code, message = _run(f"{token}\n{program}", arguments, folder, wall + GRACE)
    return _judge(code, message, token, timeout)


def _run(text: str, arguments: list[str], folder: str, seconds: float) -> tuple[int | None, str]:
    """Run the child on ``text`` to its end; return its exit status (None: time ran out) and its last word."""
    reading, writing = os.pipe()
    try:
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-B", "-X", "utf8", str(CHILD), str(writing), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(writing,),
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"The sandbox's interpreter {sys.executable} could not start: {error}.") from error
        finally:
            os.close(writing)
        code: int | None = None
        try:
            # The token comes with the program, where no other process sees it.
            child.communicate(text.encode("utf-8", "surrogatepass"), timeout=seconds)
            code = child.returncode
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            if child.stdin is not None:
                with contextlib.suppress(OSError):
                    child.stdin.close()
            child.wait()
        os.set_blocking(reading, False)
        # Nothing to read yet no end: a process that left the group still holds the other end.
        with contextlib.suppress(BlockingIOError):
            return code, os.read(reading, MESSAGE).decode(errors="replace")
        return code, ""
    finally:
        os.close(reading)


def _judge(code: int | None, message: str, token: str, timeout: float) -> Result:
    """What the child's exit status and its last word amount to."""
    isolated = f"{token} isolated\n" in message
    word = next((line for line in message.split("\n") if line.startswith(f"{token} end ")), "")
    said = word.removeprefix(f"{token} end ")
    if code is None or said == "timeout":
        return Result(False, "timeout", f"ran longer than {timeout:g} s", isolated)
    if said == "passed" and code == 0:
        return Result(True, "passed", "", isolated)
    if said.startswith("failed "):
        return Result(False, "failed", said.removeprefix("failed "), isolated)
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return Result(False, "killed", name, isolated)
    return Result(False, "exited", f"ended with status {code} before its tests were through", isolated)


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
