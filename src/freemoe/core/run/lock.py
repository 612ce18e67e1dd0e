"""One process at a time for one output: a lock of the kernel's, which it takes back when its holder dies, even by a kill."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from freemoe.core.errors import LockedError
from freemoe.core.files import disk_error, make_folder

# Where there are no such locks (Windows), two runs on one output are not told apart.
try:
    import fcntl
except ImportError:
    fcntl = None

# File that this process has locked (device, inode) -> the thread that did.
_OURS: dict[tuple[int, int], int] = {}


def acquire_lock(path: Path, output: Path) -> int | None:
    """Lock a file, which is made where it is missing; returns what `release_lock` takes.

    Returns:
        None where nothing can be locked, or where this thread has it already: it may come back to what it left.

    Raises:
        LockedError: Another process has it; at once.
        DiskError: The file cannot be made.
    """
    if fcntl is None:
        return None
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise disk_error(error, path) from error
    found = os.fstat(opened)
    mark = (found.st_dev, found.st_ino)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(opened, 32).decode(errors="replace").strip()
        os.close(opened)
        # A file system without locks refuses nobody.
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or _OURS.get(mark) == threading.get_ident():
            return None
        raise LockedError(
            f"{str(output)!r} is being written by another run (process {owner or 'unknown'}). Wait until it ends, stop it, or "
            "choose another -o."
        ) from None
    still = False
    with contextlib.suppress(OSError):
        still = os.path.samestat(found, path.stat())
    if not still:  # its holder has moved or removed it meanwhile
        os.close(opened)
        raise LockedError(f"{str(output)!r} was finished by another run just now. Look at what it wrote.")
    _OURS[mark] = threading.get_ident()
    # Told for people alone, so that a full disk does not matter.
    with contextlib.suppress(OSError):
        os.ftruncate(opened, 0)
        os.write(opened, str(os.getpid()).encode())
    return opened


def release_lock(opened: int | None) -> None:
    """Let others have what `acquire_lock` locked."""
    if opened is None:
        return
    found = os.fstat(opened)
    _OURS.pop((found.st_dev, found.st_ino), None)
    os.close(opened)


@contextlib.contextmanager
def output_lock(output: Path) -> Iterator[None]:
    """While open, no other process writes a file or folder: a hidden file beside it is locked, and removed at the end.

    Its folder is made where it is missing.

    Raises:
        LockedError: Another process writes it; at once.
        DiskError: Nothing can be written there.
    """
    path = output.with_name(f".{output.name}.lock")
    make_folder(path.parent, parents=True)
    opened = acquire_lock(path, output)
    try:
        yield
    finally:
        if opened is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            release_lock(opened)
