"""Namespaces of its own: no network, no sight of other processes, and a file tree that holds only what may be read.

The tree is a small tmpfs: the interpreter and the libraries bound into it, read-only as a whole; the private folder, a tmpfs of
limited size, at the path it has outside; a ``/dev`` with five devices and a shared memory of its own. There is no ``/proc``,
no ``/tmp``, no home, no socket of a service. Root is not needed where ordinary users may have user namespaces.
"""

from __future__ import annotations

import ctypes
import os

from freemoe.evals.sandbox.walls import DISK, FILES, SHARED
from freemoe.evals.sandbox.walls.kernel import Refused, call, require_linux, system_call
from freemoe.evals.sandbox.walls.reads import DEVICES

# NS, UTS, IPC, USER, PID, NET
CLONE_NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000


class _Attributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def leave() -> None:
    """Leave the namespaces of the caller; the *next* child is the first process of the new ones.

    Raises:
        Refused: The kernel keeps them from ordinary users.
    """
    require_linux()
    user, group = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEW)
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    except OSError as error:
        raise Refused(f"/proc/self: {error.strerror}") from error


def own_tree(folder: str, read: list[str]) -> None:
    """Make the tree, and make it the root; the working directory is the private folder in it.

    Raises:
        Refused: By the kernel; then nothing is changed.
    """
    call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    _tmpfs(folder, SHARED, FILES)
    try:
        root = folder
        for path in read:
            _bind(path, root + path, MS_RDONLY | MS_NOSUID | MS_NODEV)
        for path in DEVICES:
            _bind(path, root + path, MS_NOSUID | MS_NOEXEC)
        for path, size in ((folder, DISK), ("/dev/shm", SHARED)):
            os.makedirs(root + path, exist_ok=True)
            _tmpfs(root + path, size, FILES)
        os.chdir(root)
        call("pivot_root", ".", ".")
    except (OSError, Refused) as error:
        call("umount2", folder, MNT_DETACH)
        os.chdir(folder)
        raise Refused(f"own tree: {error}") from error
    call("umount2", ".", MNT_DETACH)
    os.chdir(folder)
    _attributes("/", MS_RDONLY | MS_NOSUID | MS_NODEV, 0)


def _tmpfs(place: str, size: int, files: int) -> None:
    call("mount", "freemoe", place, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes={files},mode=700")


def _bind(path: str, place: str, flags: int) -> None:
    if not os.path.exists(path):
        return
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "ab"):
            pass
    call("mount", path, place, None, MS_BIND | MS_REC, None)
    _attributes(place, flags, AT_RECURSIVE)


def _attributes(place: str, flags: int, how: int) -> None:
    # The flags that are used here have the same numbers for mount and for mount_setattr.
    asked = _Attributes(flags, 0, 0, 0)
    size = ctypes.sizeof(asked)
    system_call("mount_setattr", MOUNT_SETATTR, AT_FDCWD, place, how, ctypes.byref(asked), size)
