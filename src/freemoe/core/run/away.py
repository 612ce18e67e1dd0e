"""A run's folder for workers that do not see it: what they read is sent to them, what they finish is sent back.

A worker has a folder of its own for every run, with the same names in it, so that what works there need not know.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from freemoe.core.errors import ArtifactError
from freemoe.core.files import json_digest, write_atomic
from freemoe.core.run.folder import RUNNING, RunFolder, _part_files, _partial_of, _unit_file
from freemoe.core.run.lock import acquire_lock, release_lock
from freemoe.core.run.units import Unit

PREFIX = "freemoe-worker-"
"""How workers' folders begin, in the machine's folder for temporary files."""


FileRef = tuple[str, Any]
"""The digest of a file's bytes, by which who has them does not fetch them again, and what gives them by its ``get`` to any worker."""


class RunFiles:
    """What workers need of a run's folder; every file is put up for them once."""

    def __init__(self, run: RunFolder, share: Callable[[bytes], Any]) -> None:
        self._run = run
        self._share = share
        self._sent: dict[Path, tuple[tuple[int, int], FileRef]] = {}

    def upload_files(self, wanted: Callable[[str], bool]) -> dict[str, FileRef]:
        """The run's own files, and the tensors of those units that are wanted: path in its folder -> the file."""
        partial = self._run.partial
        own = [p for p in partial.iterdir() if p.is_file() and p.name != RUNNING and p.suffix != ".tmp"]
        units = [_unit_file(partial, name) for name in self._run.journal.unit_names() if wanted(name)]
        return {str(p.relative_to(partial)): self._upload_file(p) for p in [*own, *units] if p.exists()}

    def _upload_file(self, path: Path) -> FileRef:
        about = path.stat()
        mark = (about.st_size, about.st_mtime_ns)
        known = self._sent.get(path)
        if known is not None and known[0] == mark:
            return known[1]
        blob = path.read_bytes()
        sent = hashlib.sha256(blob).hexdigest(), self._share(blob)
        self._sent[path] = (mark, sent)
        return sent

    def write_results(self, files: Mapping[str, bytes]) -> None:
        """Write into the run's folder what a worker finished: path in its folder -> bytes; the journal's lines last."""
        for name, blob in files.items():
            path = self._run.partial / name
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, blob)


def run_remote_part(
    function: str, arguments: dict[str, Any], part: str, files: Mapping[str, FileRef]
) -> dict[str, bytes]:
    """Do a part of a run (`ParallelStages`) whose folder is elsewhere.

    ``output`` among the arguments is where the run's folder stands there.

    Returns:
        The files that it finished: path in the run's folder -> bytes.
    """
    output = _worker_folder() / json_digest(arguments["output"]) / "run"
    partial = _partial_of(output)
    for name, (digest, parcel) in files.items():
        path = partial / name
        # Fetched unless it is here already.
        if _here.get(path) != digest:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, parcel.get())
            _here[path] = digest
    before = set(partial.glob("units/*"))
    Unit(part, function, {**arguments, "output": str(output)}).work()
    parts = _part_files(partial, part)
    units = sorted(set(partial.glob("units/*.safetensors")) - before)
    found = {str(path.relative_to(partial)): path.read_bytes() for path in (*units, *parts)}
    for path in parts:
        # From now on it stands in the journal, which comes with the next part.
        path.unlink()
    return found


_here: dict[Path, str] = {}
_own: list[Path] = []


def _worker_folder() -> Path:
    """This process's folder; those of processes that are gone are removed."""
    if not _own:
        _remove_dead_folders(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked until this process ends, however it does.
        acquire_lock(folder / RUNNING, folder)
        _own.append(folder)
    return _own[0]


def remove_worker_folder() -> None:
    """Remove the folders that this process made for runs, with all they hold."""
    for folder in _own:
        shutil.rmtree(folder, ignore_errors=True)
    _own.clear()
    _here.clear()


def _remove_dead_folders(where: Path) -> None:
    """Remove the folders of workers that were killed."""
    for folder in where.glob(f"{PREFIX}*"):
        # Refused where it is another user's, or that of a worker who lives.
        with contextlib.suppress(OSError, ArtifactError):
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < 60:
                continue
            held = acquire_lock(folder / RUNNING, folder)
            if held is not None:
                shutil.rmtree(folder, ignore_errors=True)
                release_lock(held)
