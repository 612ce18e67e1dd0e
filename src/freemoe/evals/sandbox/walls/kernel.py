"""Calls of the Linux kernel that Python has no function for, by ctypes; what it refuses is one kind of error."""

from __future__ import annotations

import ctypes
import os
import sys

LINUX = sys.platform.startswith("linux")
libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 3, 4, 38


class Refused(Exception):
    """The kernel has no such wall, or does not give it to us."""


def require_linux() -> None:
    """Raise `Refused` on another kernel."""
    if not LINUX:
        raise Refused(f"needs Linux, not {sys.platform}")


def call(name: str, *arguments: object) -> int:
    """A function of the C library by its name.

    Raises:
        Refused: It answered with an error, which is named, or is not there.
    """
    try:
        function = getattr(libc, name)
    except AttributeError as error:
        raise Refused(f"the C library has no {name}") from error
    return checked(name, function(*[_given(a) for a in arguments]))


def system_call(name: str, number: int, *arguments: object) -> int:
    """A system call by its number.

    Raises:
        Refused: It answered with an error, which is named.
    """
    return checked(name, libc.syscall(ctypes.c_long(number), *[_given(a) for a in arguments]))


def checked(name: str, answer: int) -> int:
    """The answer of a call, unless it says that it failed."""
    if answer < 0:
        raise Refused(f"{name}: {os.strerror(ctypes.get_errno())}")
    return answer


def prctl(option: int, value: int = 0) -> int:
    """``prctl`` with one value."""
    return call("prctl", option, value, 0, 0, 0)


def _given(argument: object) -> object:
    # A C int is shorter than what some arguments are.
    if isinstance(argument, int):
        return ctypes.c_long(argument)
    return os.fsencode(argument) if isinstance(argument, str) else argument
