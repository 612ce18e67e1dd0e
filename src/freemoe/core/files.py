"""Files that are there whole or not at all, and hashes of plain data."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from pathlib import Path

from freemoe.core.errors import ArtifactError

MANIFEST = "freemoe_config.json"
"""The file that makes a folder an artefact (`artifacts`); only such a folder is ever replaced."""

CARD = "README.md"
"""The model card: words for people, which the hub lets them edit, so no checksum holds it."""


def cache_folder() -> Path:
    """Where what was measured of this machine, and tracebacks, are kept: ``FREEMOE_CACHE``, or below the user's cache."""
    own = os.environ.get("FREEMOE_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "freemoe"
    return folder.expanduser()


def digest(value: object) -> str:
    """Short stable hash of anything JSON can hold."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()[:16]


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, and survives a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def disk_error(error: OSError, path: Path) -> ArtifactError:
    """What to say when the system refuses to write ``path``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ArtifactError(
            f"The disk is full: {path} could not be written. Free some space and run the same command again; finished "
            "work is kept and not done twice."
        )
    return ArtifactError(f"{path} could not be written: {error.strerror or error}.")
