"""A filter of system calls (seccomp-BPF): the rows of `syscalls`, put together here and handed to the kernel.

A filter is a short program that looks at the number and the arguments of every call. A call by another architecture's numbers
(x32, 32 bits) ends the process.
"""

from __future__ import annotations

import ctypes
import os
import struct

from freemoe.evals.sandbox.walls.kernel import Refused, call, require_linux
from freemoe.evals.sandbox.walls.syscalls import (
    ALWAYS,
    MACHINES,
    NO_PROCESSES,
    NO_TREE,
    NONE,
    NUMBERS,
    OWN,
    RULES,
)

PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ANSWER, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
X32 = 0x40000000

Instruction = tuple[int, int, int, int]
"""Code, steps to jump over where it holds, steps where not, value."""


def program(machine: str, own: int, processes: bool, tree: bool) -> list[Instruction]:
    """The filter.

    Args:
        machine: As ``os.uname`` has it.
        own: The program's own process number.
        processes: Whether it sees only its own processes.
        tree: Whether it sees only its own file tree.

    Raises:
        Refused: The numbers of this machine's calls are not known.
    """
    if machine not in MACHINES:
        raise Refused(f"system calls of {machine} are not known here, those of {', '.join(MACHINES)} are")
    place, architecture = MACHINES[machine]
    steps: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    counts = {ALWAYS: True, NO_PROCESSES: not processes, NO_TREE: not tree}
    for _, when, answer, condition, calls in RULES:
        inner = [*_when(condition, own), (RETURN, 0, 0, ANSWER | answer)] if counts[when] else []
        for name in calls.split() if inner else ():
            if NUMBERS[name][place] != NONE:
                # Behind a row that did not count the number is loaded again: the same call may stand in another row.
                again = [(LOAD, 0, 0, NUMBER)] if condition else []
                steps += [(EQUAL, 0, len(inner) + len(again), NUMBERS[name][place]), *inner, *again]
    return [*steps, (RETURN, 0, 0, ALLOW)]


def _when(condition: tuple | None, own: int) -> list[Instruction]:
    """Steps that go on to the next one where a condition holds, and over it where not."""
    if condition is None:
        return []
    how, argument, wanted = condition
    load: list[Instruction] = [(LOAD, 0, 0, ARGUMENTS + 8 * argument)]
    if how in ("has", "has not"):
        return [*load, (ANY_BIT, 0, 1, wanted) if how == "has" else (ANY_BIT, 1, 0, wanted)]
    values = [own if value == OWN else value for value in wanted]
    # The last value decides where none before it was met.
    rest = range(len(values) - 1, -1, -1)
    if how == "is":
        return load + [(EQUAL, left, 1 if left == 0 else 0, v) for left, v in zip(rest, values, strict=True)]
    return load + [(EQUAL, left + 1, 0, v) for left, v in zip(rest, values, strict=True)]


def filter_calls(processes: bool, tree: bool) -> None:
    """Filter this process's calls, and its children's, for good; ``no_new_privs`` must be set.

    Raises:
        Refused: By the kernel, or on an unknown machine.
    """
    require_linux()
    install(program(os.uname().machine, os.getpid(), processes, tree))


def install(steps: list[Instruction]) -> None:
    """Hand a filter to the kernel.

    Raises:
        Refused: By the kernel.
    """
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    asked = Filter(len(steps), ctypes.cast(held, ctypes.c_void_p))
    call("prctl", PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(asked), 0, 0)
