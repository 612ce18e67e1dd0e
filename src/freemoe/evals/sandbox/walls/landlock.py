"""Landlock: writes in the private folder only, reads where they must be, no TCP, no signals to others; without root.

After the kernel's ``Documentation/userspace-api/landlock.rst``. A right that the ruleset *handles* is refused everywhere but where
a rule grants it, so what an ABI knows is handled whole, and no rule grants running programs, sockets, pipes with a name or
devices. ``chmod``, ``chown`` and times of files are no rights of Landlock; `seccomp` has them.
"""

from __future__ import annotations

import ctypes
import os
import stat

from freemoe.evals.sandbox.walls.kernel import require_linux, system_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_ASKED, PATH_BENEATH = 1, 1

# Right of a file or folder -> (bit, first ABI that has it, granted in the private folder).
RIGHTS = {
    "execute": (0, 1, False),
    "write_file": (1, 1, True),
    "read_file": (2, 1, True),
    "read_dir": (3, 1, True),
    "remove_dir": (4, 1, True),
    "remove_file": (5, 1, True),
    "make_char": (6, 1, False),
    "make_dir": (7, 1, True),
    "make_reg": (8, 1, True),
    "make_sock": (9, 1, False),
    "make_fifo": (10, 1, False),
    "make_block": (11, 1, False),
    "make_sym": (12, 1, True),
    "refer": (13, 2, True),
    "truncate": (14, 3, True),
    "ioctl_dev": (15, 5, False),
}
OF_FILES = ("execute", "write_file", "read_file", "truncate", "ioctl_dev")
NETWORK = (3, 4)  # bind and connect of TCP; first ABI
SCOPES = (3, 6)  # abstract sockets and signals of others; first ABI


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def abi() -> int:
    """The version that the kernel has, from 1.

    Raises:
        Refused: It has none, or it is switched off.
    """
    require_linux()
    return system_call("landlock_create_ruleset", CREATE_RULESET, None, 0, VERSION_ASKED)


def bits(names: tuple[str, ...] | list[str], version: int) -> int:
    """Rights by name as the kernel's number, those left out that an ABI does not know."""
    return sum(1 << RIGHTS[n][0] for n in names if RIGHTS[n][1] <= version)


def confine(written: list[str], read: list[str], devices: tuple[str, ...]) -> None:
    """Restrict this process and its children for good; ``no_new_privs`` must be set.

    Args:
        written: Folders to write in.
        read: Files and folders to read.
        devices: Devices to read and write.

    Raises:
        Refused: By the kernel.
    """
    version = abi()
    handled = _Ruleset(
        bits(list(RIGHTS), version),
        NETWORK[0] if version >= NETWORK[1] else 0,
        SCOPES[0] if version >= SCOPES[1] else 0,
    )
    # Older kernels take a longer struct whose tail they do not know only if it is zero, which it is then.
    size = ctypes.sizeof(handled)
    ruleset = system_call("landlock_create_ruleset", CREATE_RULESET, ctypes.byref(handled), size, 0)
    private = [name for name, (_, _, granted) in RIGHTS.items() if granted]
    try:
        for path in written:
            _grant(ruleset, path, private, version)
        for path in read:
            _grant(ruleset, path, ["read_file", "read_dir"], version)
        for path in devices:
            _grant(ruleset, path, ["read_file", "write_file"], version)
        system_call("landlock_restrict_self", RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _grant(ruleset: int, path: str, rights: list[str], version: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no rule
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights = [r for r in rights if r in OF_FILES]
        rule = _Beneath(bits(rights, version), place)
        system_call("landlock_add_rule", ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(place)
