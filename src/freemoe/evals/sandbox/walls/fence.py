"""The inner fence: audit hooks that refuse, in plain words, what a tested function has no business with.

They stand inside the program's own interpreter, so they are no wall: they keep off what models write by chance, name what was
wrong, and spare what the walls cannot tell apart. A hook's frame can be reached through the traceback of what it raises: all that
it uses is an argument that is made anew in every call.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

Hook = Callable[[str, tuple], None]

NEVER = tuple(
    """
    socket. subprocess. pty. os.exec os.posix_spawn os.spawn os.system os.startfile os.forkpty signal.pthread_kill syslog.
    webbrowser. ftplib. smtplib. http.client. urllib. resource.setrlimit resource.prlimit fcntl.ioctl gc.get_ sys.settrace
    ctypes.dlsym ctypes.call_function ctypes.string_at ctypes.wstring_at ctypes.PyObj_FromPtr
    """.split()  # noqa: SIM905
)
"""Beginnings of the events that are refused, whatever it is that they are about."""
ONE_PATH = ("os.chmod", "os.chown", "os.utime", "os.mkdir")
"""Changes whose first argument alone is a path that counts."""
CHANGES = tuple(
    """
    os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.chmod os.chown os.chflags os.truncate os.utime os.setxattr
    os.removexattr shutil.rmtree shutil.move shutil.chown sqlite3.connect
    """.split()  # noqa: SIM905
)
"""Changes of files, which are refused outside the private folder."""
OF_MODES = ("os.chmod", "os.chown", "os.utime")
"""Changes that a descriptor or an open folder can stand for, which no wall but a tree of its own tells apart."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SIGNALS = (8, 10, 15)
"""Commands of ``fcntl`` that have the kernel send signals: F_SETOWN, F_SETSIG, F_SETOWN_EX."""


def fence(folder: str, processes: bool, tree: bool) -> tuple[Hook, Hook]:
    """Make the hooks.

    Args:
        folder: The private one.
        processes: Whether the program sees only its own processes: it may start and end some.
        tree: Whether it sees only its own file tree: modes and owners of open files are its own affair.
    """
    return _doings(processes), _places(os.path.realpath(folder), tree)


def _doings(processes: bool) -> Hook:
    myself = os.getpid()

    def hook(
        event: str,
        arguments: tuple,
        *,
        never: tuple[str, ...] = NEVER,
        signals: tuple[int, ...] = SIGNALS,
        own: int = myself,
        processes: bool = processes,
        error: type = PermissionError,
    ) -> None:
        refused = event.startswith(never)
        if event == "socket.__new__" and arguments[1] == 1:
            refused = False  # a pair of one's own, as asyncio has it; other uses of it are refused by their own names
        elif event in ("os.fork", "os.kill", "os.killpg"):
            refused = not processes and not (event == "os.kill" and arguments[0] == own)
        elif event == "fcntl.fcntl":
            refused = arguments[1] in signals
        elif event == "import":
            refused = arguments[0] in ("posix", "_posixsubprocess")  # another copy of what has been taken away
        elif event == "ctypes.dlopen" and arguments[0] is not None:
            raise error("the sandbox refuses native libraries")
        if refused:
            raise error(f"the sandbox refuses {event}")

    return hook


def _places(private: str, tree: bool) -> Hook:
    # Shared memory of its own stands in its own tree.
    inside = (private + os.sep, *(("/dev/shm/",) if tree else ()))

    def hook(
        event: str,
        arguments: tuple,
        *,
        root: str = private,
        beneath: tuple[str, ...] = inside,
        changes: tuple[str, ...] = CHANGES,
        of_modes: tuple[str, ...] = () if tree else OF_MODES,
        one_path: tuple[str, ...] = ONE_PATH,
        writing: int = WRITING,
        realpath: Callable = os.path.realpath,
        fsdecode: Callable = os.fsdecode,
        isinstance: Callable = isinstance,
        number: type = int,
        texts: tuple[type, ...] = (str, bytes),
        error: type = PermissionError,
    ) -> None:
        paths: tuple = ()
        if event == "open":
            if (
                isinstance(arguments[2], number)
                and arguments[2] & writing
                and arguments[0] not in ("/dev/null", b"/dev/null")
            ):
                paths = arguments[:1]
        elif event in changes:
            paths = arguments[: 1 if event in one_path else 2]
            if event in of_modes and (isinstance(paths[0], number) or arguments[-1] != -1):
                raise error(f"the sandbox refuses {event} of open files and relative to open folders")
            if event == "sqlite3.connect" and paths[0] in (":memory:", ""):
                paths = ()
        for path in paths:
            if not isinstance(path, texts):
                continue  # a descriptor that is open already, or no path at all
            full = realpath(fsdecode(path))
            if not (full == root or full.startswith(beneath)):
                what = "to write" if event == "open" else event
                raise error(f"the sandbox refuses {what} outside its directory")

    return hook


UNSEEN = """
    chroot mknod memfd_create pidfd_open posix_openpt setns unshare pidfd_send_signal setuid setgid setreuid setregid setresuid
    setresgid setgroups fork_exec
""".split()  # noqa: SIM905
"""Functions that no audit event tells of."""
OF_OTHERS = """
    mkfifo setpriority sched_setaffinity sched_setscheduler sched_setparam setsid setpgid setpgrp nice shm_open shm_unlink
""".split()  # noqa: SIM905
"""The same, harmless where the program has processes and a file tree of its own."""


def take_away(processes: bool) -> None:
    """Put a refusal in the place of functions that no audit event tells of."""
    import _posixsubprocess
    import posix

    modules: list[object] = [posix, os, signal, _posixsubprocess]
    if not processes:
        try:
            import _posixshmem
        except ImportError:
            pass
        else:
            modules.append(_posixshmem)
    for name in (*UNSEEN, *(() if processes else OF_OTHERS)):
        for module in modules:
            if hasattr(module, name):
                setattr(module, name, _refusal(name))


def _refusal(name: str) -> Callable[..., None]:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(f"the sandbox refuses {name}")

    return refused
