"""What runs on a machine of the cluster: it does units, one at a time, as a process of this machine would."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from freemoe.core.environment import DECIDING, package_versions
from freemoe.core.errors import FreeMoEError, WorkerError
from freemoe.core.run.away import remove_worker_folder
from freemoe.core.run.units import Unit, run_pickled


class WorkerActor:
    """A worker of the cluster; Ray makes it, in a process of its own.

    Paths of units are relative to ``folder``, where the first process works; what of its ``path`` for modules is on this
    machine counts here too.
    """

    def __init__(self, folder: str, path: Sequence[str], threads: int | None) -> None:
        self._folder = folder
        self._threads = threads
        sys.path += [place for place in path if place not in sys.path and Path(place).exists()]

    def begin(self, needs: Sequence[str], expected: dict[str, str]) -> bytes:
        """See whether units can be done here: a pickled pair like an answer's, with this process's number and machine."""
        try:
            if Path(self._folder).is_dir():
                os.chdir(self._folder)
            require_alike(needs, expected)
        except FreeMoEError as error:
            return pickle.dumps((False, error))
        if self._threads is not None:
            import torch

            torch.set_num_threads(self._threads)
        return pickle.dumps((True, {"pid": os.getpid(), "machine": socket.gethostname()}))

    def do(self, unit: Unit) -> bytes:
        """Do a unit in this process (`freemoe.core.run.units.run_pickled`)."""
        return run_pickled(unit, f"process {os.getpid()} on {socket.gethostname()}")

    def leave(self) -> None:
        """Put away what lies about here."""
        remove_worker_folder()


def require_alike(needs: Sequence[str], expected: dict[str, str]) -> None:
    """Raise unless this machine has what the first one has."""
    here = socket.gethostname()
    missing = [path for path in needs if not Path(path).exists()]
    if missing:
        raise WorkerError(
            f"The machine {here!r} of the cluster has no {', '.join(map(repr, missing))}. Models, data and artefacts are not sent: "
            "put them where every machine reads them under the same path (a shared folder), or name a repository of the hub. "
            "Results are sent back, so that the output need not be shared."
        )
    found = package_versions(DECIDING)
    other = [f"{name} {found.get(name)} instead of {version}" for name, version in expected.items()
             if found.get(name) != version]  # fmt: skip
    if other:
        raise WorkerError(
            f"The machine {here!r} of the cluster has {', '.join(other)}: the same bytes come from the same versions only. "
            "Install them there as they are here."
        )
