"""Files that are there whole or not at all, and hashes of plain data."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from freemoe.core.errors import ArtifactError, DiskError

WATCHERS: list[Callable[[str, str], None]] = []
"""Told of every write: ``begins``, ``half`` or ``done``, and what. Empty but in `tests/hardening/kill`, whose processes die there."""

MANIFEST = "freemoe_config.json"
"""The file that makes a folder an artefact (`artifacts`); only such a folder is ever replaced."""

TEMPORARY = ".tmp"
"""Ending of a file that is being written: never a whole one, and removed by the next run where a kill left it."""

PAGES = ("report.html", "plans.svg")
"""What is drawn from a result, and again by `freemoe report`: no manifest lists it."""

CARD = "README.md"
"""The model card: words for people, which the hub lets them edit, so no checksum holds it."""


def cache_folder() -> Path:
    """Where what was measured of this machine, and tracebacks, are kept: ``FREEMOE_CACHE``, or below the user's cache."""
    own = os.environ.get("FREEMOE_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "freemoe"
    return folder.expanduser()


def json_digest(value: object) -> str:
    """Short stable hash of anything JSON can hold."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()[:16]


def notify_watchers(stage: str, what: str) -> None:
    """Tell those who watch how far a write is; nobody does in an ordinary run."""
    for watcher in WATCHERS:
        watcher(stage, what)


def write_synced(stream: BinaryIO, data: bytes, what: str) -> None:
    """Write to an open file and wait until the disk has it."""
    if WATCHERS:
        half = len(data) // 2
        stream.write(data[:half])
        stream.flush()
        notify_watchers("half", what)
        data = data[half:]
    stream.write(data)
    stream.flush()
    os.fsync(stream.fileno())


def write_atomic(path: Path, data: bytes, what: str = "") -> None:
    """Write a file so that it is there whole or not at all, and survives a power cut.

    ``what`` is what `WATCHERS` call it; its name if absent.

    Raises:
        DiskError: The system refuses; what stood there before still stands.
    """
    what = what or path.name
    temporary = path.with_name(path.name + TEMPORARY)
    notify_watchers("begins", what)
    try:
        with temporary.open("wb") as stream:
            write_synced(stream, data, what)
        temporary.replace(path)
    except OSError as error:
        # Asked before the half that was written gives its room back.
        found = disk_error(error, path, len(data))
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise found from error
    notify_watchers("done", what)


def make_folder(path: Path, parents: bool = False) -> None:
    """Make a folder where there is none; a DiskError where the system refuses."""
    try:
        path.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path) from error


_GO_ON = "run the same command again: finished work is kept and not done twice"
_ADVICE = {
    errno.ENOSPC: ("The disk is full", f"Free some space and {_GO_ON}."),
    errno.EDQUOT: ("Your quota of the disk is used up", f"Delete something or have it raised, and {_GO_ON}."),
    errno.EROFS: ("The file system is read-only", f"Mount it writable and {_GO_ON}; or choose another place (-o)."),
    errno.EFBIG: (
        "A file would be larger than this process or the file system allows",
        f"Raise the limit (ulimit -f) and {_GO_ON}; or choose a file system without it (-o).",
    ),
    errno.ENOENT: (
        "The folder is not there",
        "It was removed or unmounted meanwhile, or never made. Put it back and run the same command again.",
    ),
    errno.ESTALE: ("The network file system lost the folder", f"Mount it again and {_GO_ON}."),
    errno.EIO: ("The disk failed", f"Look after it; then {_GO_ON}."),
}


def disk_error(error: OSError, path: Path, size: int | None = None) -> DiskError:
    """What to say when the system refuses to write ``path``: what, where, how much room there is, what to do."""
    cause, advice = _ADVICE.get(error.errno or 0, ("", ""))
    if not cause:
        return DiskError(f"{path} could not be written: {error.strerror or error}.")
    room = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        asked = f"{size:,} bytes were to be written, " if size is not None else ""
        room = f" ({asked}{_free_bytes(path):,} are free there)"
    return DiskError(f"{cause}: {path} could not be written{room}. {advice}")


def as_disk_error(error: BaseException, path: Path) -> DiskError | None:
    """What another package's failed write says of the disk; None where it is about something else.

    The error is the system's, or one that quotes it, as safetensors' own does.
    """
    number = error.errno if isinstance(error, OSError) and not isinstance(error, ArtifactError) else None
    quoted = re.search(r"os error (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else None
    number = int(quoted[1]) if quoted else number
    # A file that is not there is mostly one that was to be read.
    if number not in _ADVICE or (number == errno.ENOENT and path.exists()):
        return None
    return disk_error(OSError(number, os.strerror(number)), path)


def _free_bytes(path: Path) -> int:
    """Of the file system that a path is, or would be, on."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0
