"""A run that notes its writes, or dies at one of them, in a process of its own.

It is forked from one that has everything imported, and that has no threads: a kill costs no new interpreter.
"""

import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from queue import LifoQueue

from freemoe.core import files
from freemoe.core.errors import FreeMoEError
from freemoe.core.run import unit_state
from tests.hardening.kill.systems import carry_out
from tests.hardening.worker import Worker

FIRST_KEPT = -1
"""In place of a write's number: behind the first one that a later process goes on from, of the journal or of a state."""

NOTED = "events.json"
PATIENCE = 900.0
_SAID = "said.txt"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_IMPORTED_LATE = ("sklearn.cluster", "transformers.models.auto.modeling_auto")


class Runs:
    """Does runs, as many side by side as there are cores."""

    def __init__(self):
        self.side_by_side = os.cpu_count() or 1
        self._free: LifoQueue[Worker | None] = LifoQueue()
        for _ in range(self.side_by_side):
            self._free.put(None)  # started when it is first needed

    def run(self, system, folder, dies_at=None, noted=False):
        """How a run ended: its code, or the negative number of a signal; one that fails raises the end of what it said.

        ``dies_at`` counts its writes from 0: at that one the process kills itself. ``noted`` leaves the list of them in the folder.
        """
        worker = self._free.get()
        try:
            worker = worker or Worker(__name__, environment=_ENVIRONMENT)
            code = worker.ask([system, str(folder), dies_at, noted], PATIENCE)
        finally:
            self._free.put(worker)
        if code > 0:
            said = (folder / _SAID).read_text(encoding="utf-8", errors="replace").strip()
            raise FreeMoEError(f"The run of {system!r} in {folder} failed with code {code}: {said[-800:]}")
        return code

    def close(self):
        while not self._free.empty():
            if worker := self._free.get():
                worker.close()


def start():
    """What such a process does when it is asked for a run."""
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    return _run_in_child


def _run_in_child(asked):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        _run(*asked)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(system, folder, dies_at, noted):
    os.chdir(folder)
    # What it says is read where it fails.
    said = os.open(_SAID, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, sys.stdout.fileno())
    os.dup2(said, sys.stderr.fileno())
    warnings.simplefilter("ignore")
    # A state after every step: by the clock there would be none in runs of seconds.
    unit_state.SECONDS = unit_state.SHARE = 0.0
    events = []
    files.WATCHERS.append(_noting(events, dies_at))
    carry_out(system)
    if noted:
        Path(NOTED).write_text(json.dumps(events), encoding="utf-8")


def _noting(events, dies_at):
    def note(stage, what):
        # Tensors of a unit count when the journal names them.
        kept = stage == "done" and what.partition(" ")[0] in ("journal", "state")
        if len(events) == dies_at or (kept and dies_at == FIRST_KEPT):
            os.kill(os.getpid(), signal.SIGKILL)
        events.append((stage, what))

    return note
