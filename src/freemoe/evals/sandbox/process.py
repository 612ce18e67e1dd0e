"""The sandbox's process, seen from outside: started, watched, ended with everything that it has started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox.usage import below, held, resident
from freemoe.evals.sandbox.walls import DISK, FILES, PROCESSES
from freemoe.evals.sandbox.walls.bubblewrap import command, found
from freemoe.evals.sandbox.walls.closed import memory_closed
from freemoe.evals.sandbox.walls.limits import tasks
from freemoe.evals.sandbox.walls.reads import readable

CHILD = Path(__file__).with_name("child.py")
SOURCE = str(Path(__file__).parents[3])
MESSAGE = 8192
"""Bytes of the child's words that are read."""
STEP = 0.1
"""Seconds between two looks at what all its processes use together."""
TICK = 0.01
"""Seconds between two looks at how many processes the machine has."""


@dataclass(frozen=True)
class Ended:
    """How the process ended.

    Attributes:
        code: Exit status; None: it was stopped from outside.
        words: What it wrote: up to the line ``go`` (or ``refused``) ours, after it perhaps the program's.
        why: Why it was stopped, if it was: ``time``, or what it used too much of.
    """

    code: int | None
    words: str
    why: str = ""


def run_inside(text: str, arguments: list[str], walls: tuple[str, ...], seconds: float, memory: int) -> Ended:
    """Run ``text`` inside to its end.

    Args:
        text: The word that makes a pass, a line; the program.
        arguments: Of ``inside.py``, behind the descriptor.
        walls: That are asked for.
        seconds: Of wall clock, all in all.
        memory: Bytes that all its processes may have together.

    Raises:
        SandboxError: It cannot be started.
    """
    with _private_folder() as folder, memory_closed():
        reading, writing = os.pipe()
        try:
            child = _start(text, arguments, walls, folder, writing)
            return _watch(child, reading, folder, seconds, memory)
        finally:
            os.close(reading)


@contextlib.contextmanager
def _private_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="freemoe-sandbox-")
    try:
        yield folder
    finally:
        try:
            os.rmdir(folder)
        except OSError:
            # Folders in folders, thousands deep, are too much for Python's own way.
            subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _start(text: str, arguments: list[str], walls: tuple[str, ...], folder: str, writing: int) -> subprocess.Popen:
    words = [sys.executable, "-I", "-B", "-X", "utf8", str(CHILD), SOURCE, str(writing), *arguments]
    if "bubblewrap" in walls:
        bwrap = found()
        if bwrap is None:
            raise SandboxError(
                "bubblewrap is asked for, and there is no bwrap on the PATH. Install it, or leave it out."
            )
        words = command(bwrap, folder, readable([*sys.path, SOURCE])) + words
    # Not a pipe: what is written into one before the child reads it may be too much for it. It has no name.
    with tempfile.TemporaryFile() as given:
        given.write(text.encode("utf-8", "surrogatepass"))
        given.seek(0)
        try:
            return subprocess.Popen(
                words,
                stdin=given,
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


def _watch(child: subprocess.Popen, reading: int, folder: str, seconds: float, memory: int) -> Ended:
    """Read what the child says until it ends or has to be ended."""
    deadline, said, why, open_ = time.monotonic() + seconds, b"", "", True
    begun, look = tasks(), time.monotonic() + STEP
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
                if time.monotonic() >= look or tasks() > begun + PROCESSES:
                    why = _too_much(child.pid, folder, memory)
                    look = time.monotonic() + STEP
    finally:
        _end(child)
    os.set_blocking(reading, False)
    # Nothing to read yet no end: a process that left the group still holds the other end.
    with contextlib.suppress(BlockingIOError):
        said += os.read(reading, MESSAGE - len(said))
    return Ended(None if why else child.returncode, said.decode(errors="replace"), why)


def _end(child: subprocess.Popen) -> None:
    for other in below(child.pid) if child.poll() is None else ():
        with contextlib.suppress(OSError):
            os.kill(other, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _too_much(child: int, folder: str, memory: int) -> str:
    """What all its processes use too much of together; nothing where the machine does not say."""
    processes = [child, *below(child)]
    if len(processes) > PROCESSES + 2:
        return f"more than {PROCESSES} processes"
    if sum(map(resident, processes)) > memory:
        return f"more than {memory >> 20} MB of memory in {len(processes)} processes"
    size, number = held(folder, FILES)
    if size > DISK:
        return f"more than {DISK >> 20} MB of files"
    if number > FILES:
        return f"more than {FILES} files"
    return ""
