"""What the processes of `python -m benchmarks kill` do: a run that notes its writes, or dies at one of them.

They are forked from one that has everything imported, and that has no threads: a kill costs no new interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path

from benchmarks.compat import stop_forkserver
from benchmarks.kill.systems import carry_out
from freemoe.core import files
from freemoe.core.errors import FreeMoEError
from freemoe.core.run import unit_state

Event = tuple[str, str]
"""Stage of a write (``begins``, ``half``, ``done``) and what is written."""

FIRST_KEPT = -1
"""In place of a write's number: behind the first one that a later process goes on from, of the journal or of a state."""

NOTED = "events.json"
_SAID = "said.txt"

# Starting a process also looks whether others have ended, and how one ended can be read once: of two threads that look at the
# same time one would be told 255.
_LOOKING = threading.Lock()


@contextmanager
def processes() -> Iterator[ForkServerContext]:
    """While open, processes are forked from one that has everything imported and runs on one thread."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")}
    # One that runs already may have been started with other threads, or without our modules.
    stop_forkserver()
    context.set_forkserver_preload(["benchmarks.kill.warm"])
    os.environ.update({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    try:
        yield context
    finally:
        stop_forkserver()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def run_in(
    context: ForkServerContext, system: str, folder: Path, dies_at: int | None = None, noted: bool = False
) -> int:
    """Do a run in a process of its own; returns how it ended: its code, or the negative number of a signal.

    Args:
        context: Of `processes`.
        system: Name of the run.
        folder: Where.
        dies_at: Number of the write, counted from 0, at which the process kills itself; None: it lives.
        noted: Leave the list of its writes in the folder.

    Raises:
        FreeMoEError: The run failed; with the end of what it said.
    """
    process = context.Process(target=_run, args=(system, str(folder), dies_at, noted))
    with _LOOKING:
        process.start()
    wait([process.sentinel])
    with _LOOKING:
        process.join()
    code = process.exitcode or 0
    if code > 0:
        said = (folder / _SAID).read_text(encoding="utf-8", errors="replace").strip()
        raise FreeMoEError(f"The run of {system!r} in {folder} failed with code {code}: {said[-800:]}")
    return code


def _run(system: str, folder: str, dies_at: int | None, noted: bool) -> None:
    os.chdir(folder)
    # What it says is read where it fails.
    said = os.open(_SAID, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, sys.stdout.fileno())
    os.dup2(said, sys.stderr.fileno())
    warnings.simplefilter("ignore")
    # A state after every step: by the clock there would be none in runs of seconds.
    unit_state.SECONDS = unit_state.SHARE = 0.0
    events: list[Event] = []
    files.WATCHERS.append(_noting(events, dies_at))
    carry_out(system)
    if noted:
        Path(NOTED).write_text(json.dumps(events), encoding="utf-8")


def _noting(events: list[Event], dies_at: int | None) -> Callable[[str, str], None]:
    def note(stage: str, what: str) -> None:
        # Tensors of a unit count when the journal names them.
        kept = stage == "done" and what.partition(" ")[0] in ("journal", "state")
        if len(events) == dies_at or (kept and dies_at == FIRST_KEPT):
            os.kill(os.getpid(), signal.SIGKILL)
        events.append((stage, what))

    return note
