"""Bubblewrap, the wall around generated programs: what it is told, and whether it starts here."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
import sys
from functools import cache

from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox import inside

FOLDER = "/freemoe-sandbox"  # The program's working folder inside: a tmpfs of its own
DISK = 64 << 20  # Bytes of that folder
SHARED = 16 << 20  # Bytes of the program's own ``/dev/shm``
ENVIRONMENT = {"HOME": FOLDER, "TMPDIR": FOLDER, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
SCRIPT = "/inside.py"

_SYSTEM = (
    *("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/lib", "/lib32", "/lib64", "/nix/store"),
    *("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/sys/devices/system/cpu"),
)

# Memory that belongs to no process, so that no limit and no look at processes counts it: architecture as the kernel names it,
# numbers of shmget, msgget, memfd_create, memfd_secret.
_UNCOUNTED = {"x86_64": (0xC000003E, (29, 68, 319, 447)), "aarch64": (0xC00000B7, (194, 186, 279, 447))}


@cache
def find_bwrap() -> str:
    """Path of a ``bwrap`` that starts here.

    Raises:
        SandboxError: There is none, or it does not start; with its own words.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise _bwrap_error("there is no bwrap on the PATH")
    words = [*isolated_command(bwrap), sys.executable, "-I", "-c", "pass"]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise _bwrap_error(f"{bwrap} ends with status {done.returncode}: {' '.join(done.stderr.split())[:500]}")
    return bwrap


def _bwrap_error(why: str) -> SandboxError:
    return SandboxError(
        f"Generated programs run inside bubblewrap only, which does not start here: {why}. Install it (Debian and Ubuntu: "
        "apt-get install bubblewrap; 0.8 or newer), and allow user namespaces. In a container with nothing to lose, say "
        "--allow-code-execution=unsafe (Python: 'unsafe'), which runs them without."
    )


def isolated_command(bwrap: str, *options: str) -> list[str]:
    """What to write before a command, so that it runs inside: no network, no other process, no file but its interpreter's.

    There is no ``/proc`` inside: nothing right needs one, and it would show a program its own memory as a file.
    """
    words = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL", "--clearenv", *options]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    words += ["--dev", "/dev"]
    for path in readable_paths():
        words += ["--ro-bind", path, path]
    words += ["--ro-bind", inside.__file__, SCRIPT]
    words += ["--size", str(SHARED), "--tmpfs", "/dev/shm", "--size", str(DISK), "--tmpfs", FOLDER]
    # What bubblewrap itself makes is a tmpfs without a size.
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER, "--"]


@cache
def readable_paths() -> tuple[str, ...]:
    """Folders and files of the interpreter and its libraries, none inside another one.

    ``sys.path`` does not count: it may name the folder that the user works in.
    """
    paths = {os.path.abspath(p) for p in (*_SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix) if os.path.exists(p)}
    paths |= {os.path.realpath(p) for p in paths}
    return tuple(sorted(p for p in paths if not any(p.startswith(other + os.sep) for other in paths)))


def refuse_uncounted_memory() -> bytes:
    """A filter of system calls for bubblewrap's ``--seccomp``; empty on machines whose numbers we do not know."""
    if platform.machine() not in _UNCOUNTED:
        return b""
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    architecture, numbers = _UNCOUNTED[platform.machine()]
    rest = len(numbers)
    steps = [
        (load, 0, 0, 4),
        (equal, 0, rest + 3, architecture),
        (load, 0, 0, 0),
        (at_least, rest + 1, 0, 0x40000000),  # x32, the same calls by other numbers
        *((equal, rest - n, 0, number) for n, number in enumerate(numbers)),
        (answer, 0, 0, 0x7FFF0000),  # allowed
        (answer, 0, 0, 0x00050001),  # not permitted
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
