"""The sandbox's process, seen from outside: started, watched, ended with everything that it has started."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal

from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox import inside
from freemoe.evals.sandbox.bubblewrap import (
    ENVIRONMENT,
    FOLDER,
    SCRIPT,
    find_bwrap,
    isolated_command,
    refuse_uncounted_memory,
)
from freemoe.evals.sandbox.usage import count_machine_tasks, descendant_processes, memory_in_use, num_files

Isolation = Literal["bubblewrap", "none"]

WALL = 3.0  # Wall clock per second of CPU time: a busy machine must not fail a program that another one passes
GRACE = 2.0  # Seconds beyond the program's own for starting the interpreter, before all of it is ended
PROCESSES = 64  # Processes and threads of a program, all together
FILES = 1024  # Files and folders in its folder
MESSAGE = 8192  # Bytes of the child's words that are read
STEP = 0.1  # Seconds between two looks at what all its processes use together
TICK = 0.01  # Seconds between two looks at how many processes the machine has
# Where memory runs out, the kernel ends the program's processes before any other.
_BEFORE = 'echo 1000 >/proc/self/oom_score_adj; [ -z "$0" ] || echo $$ >"$0/cgroup.procs" || exit 1; exec "$@"'


@dataclass(frozen=True)
class ProcessOutcome:
    """How the process came to its end."""

    code: int | None  # Exit status; None: it was stopped from outside
    words: str  # What it wrote: ``go`` when it was ready, and behind it perhaps the program's words
    why: str = ""  # Why it was stopped, if it was: ``time``, or what it used too much of


def run_inside(text: str, isolation: Isolation, seconds: float, memory: int) -> ProcessOutcome:
    """Run ``text`` inside to its end.

    ``text``: the word that makes a pass, a line; the program. ``isolation``: ``none`` runs it in a folder of this machine.
    ``seconds``: of CPU time. ``memory``: bytes of address space of each of its processes, and of memory of all together.

    Raises:
        SandboxError: It cannot be started.
    """
    processes = PROCESSES + (count_machine_tasks() if isolation == "none" else 0)
    with contextlib.ExitStack() as stack:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        arguments = [str(writing), repr(seconds), repr(seconds * WALL), str(memory), str(processes)]
        try:
            # Not a pipe: what is written into one before the child reads it may be too much for it.
            given = stack.enter_context(_nameless_file(text.encode("utf-8", "surrogatepass")))
            child = _start_process(stack, isolation, arguments, given, writing)
        finally:
            os.close(writing)
        return _watch_process(child, isolation, reading, seconds * WALL + GRACE, memory)


@contextlib.contextmanager
def _nameless_file(data: bytes) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        yield file


def _start_process(
    stack: contextlib.ExitStack, isolation: Isolation, arguments: list[str], given: IO[bytes], writing: int
) -> subprocess.Popen:
    """Start the script with what stands around it, which ends with ``stack``."""
    passed, before = [writing], []
    if isolation == "none":
        folder, group, script = stack.enter_context(_temporary_folder()), "", inside.__file__
    else:
        folder, group, script, options = "/", stack.enter_context(_control_group()), SCRIPT, []
        if rules := refuse_uncounted_memory():
            passed.append(stack.enter_context(_nameless_file(rules)).fileno())
            options = ["--seccomp", str(passed[-1])]
        before = isolated_command(find_bwrap(), *options)
    python = [sys.executable, "-I", "-X", "utf8", "-B", script]
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _BEFORE, group, *before, *python, *arguments],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            pass_fds=passed,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"The sandbox's interpreter {sys.executable} could not start: {error}.") from error


@contextlib.contextmanager
def _control_group() -> Iterator[str]:
    """Folder of a control group that bounds the number of processes, which no limit does for root; empty where there is none."""
    for parent in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        group = f"{parent}/freemoe-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            os.mkdir(group)
            try:
                with open(f"{group}/pids.max", "r+", encoding="ascii") as file:
                    file.write(str(PROCESSES + 4))
            except OSError:
                os.rmdir(group)
                continue
            break
    else:
        yield ""
        return
    try:
        yield group
    finally:
        # The kernel takes away the last processes a moment after the first one.
        for _ in range(200):
            try:
                os.rmdir(group)
                break
            except OSError:
                time.sleep(0.005)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="freemoe-sandbox-")
    try:
        yield folder
    finally:
        # Folders in folders, thousands deep, are too much for Python's own way.
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _watch_process(
    child: subprocess.Popen, isolation: Isolation, reading: int, seconds: float, memory: int
) -> ProcessOutcome:
    """Read what the child says until it ends or has to be ended."""
    deadline, said, why, open_ = time.monotonic() + seconds, b"", "", True
    begun, look = count_machine_tasks(), time.monotonic() + STEP
    try:
        while child.poll() is None and not why:
            left = deadline - time.monotonic()
            if left <= 0:
                why = "time"
            elif open_ and select.select([reading], [], [], min(TICK, left))[0]:
                part = os.read(reading, MESSAGE - len(said)) if len(said) < MESSAGE else b""
                said += part
                open_ = bool(part)
                if not open_:
                    # The end of all that is said: it ends now, or was closed by the program.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(min(TICK, left))
            else:
                if not open_:
                    time.sleep(min(TICK, left))
                # Processes that make processes are thousands before the next look: their number is asked for at every tick.
                if time.monotonic() >= look or count_machine_tasks() > begun + PROCESSES:
                    why = _too_much(child.pid, memory)
                    look = time.monotonic() + STEP
    finally:
        _kill_process_tree(child, isolation)
    os.set_blocking(reading, False)
    # Nothing to read yet no end: a process that left the group still holds the other end.
    with contextlib.suppress(BlockingIOError):
        said += os.read(reading, MESSAGE - len(said))
    return ProcessOutcome(None if why else child.returncode, said.decode(errors="replace"), why)


def _kill_process_tree(child: subprocess.Popen, isolation: Isolation) -> None:
    # The kernel ends a namespace of processes with bubblewrap: nobody counts first those that a fork bomb makes meanwhile.
    below = descendant_processes(child.pid) if isolation == "none" and child.poll() is None else ()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for other in below:
        with contextlib.suppress(OSError):
            os.kill(other, signal.SIGKILL)
    child.wait()


def _too_much(child: int, memory: int) -> str:
    """What all its processes use too much of together; nothing where the machine does not say."""
    below = descendant_processes(child)
    # Bubblewrap's own processes are three at most.
    if sum(below.values()) > PROCESSES + 3:
        return f"more than {PROCESSES} processes and threads"
    if memory_in_use([child, *below]) > memory:
        return f"more than {memory >> 20} MB of memory in {len(below) + 1} processes"
    if any(num_files(process, FOLDER) > FILES for process in below):
        return f"more than {FILES} files"
    return ""
