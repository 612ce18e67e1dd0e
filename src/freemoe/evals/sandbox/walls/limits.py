"""Bounds of one process: CPU time, address space, sizes and numbers of files, processes."""

from __future__ import annotations

import math
import resource

from freemoe.evals.sandbox.walls import FILE_SIZE, OPEN_FILES, PROCESSES


def set_limits(seconds: float, memory: int, alone: bool) -> None:
    """Limit this process for good.

    Args:
        seconds: Of CPU time.
        memory: Bytes of address space.
        alone: Whether it counts its own processes only, as in a user namespace; else the machine's come on top.
    """
    cpu = math.ceil(seconds) + 1
    processes = PROCESSES + (0 if alone else tasks())
    wanted = (
        ("RLIMIT_CPU", cpu),
        ("RLIMIT_AS", memory),
        ("RLIMIT_FSIZE", FILE_SIZE),
        ("RLIMIT_NOFILE", OPEN_FILES),
        ("RLIMIT_NPROC", processes),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MSGQUEUE", 0),
        ("RLIMIT_MEMLOCK", 0),
    )
    for name, value in wanted:
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            value = min(value, most)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            # macOS knows no limit of the address space; the others are set everywhere.
            if name != "RLIMIT_AS":
                raise


def tasks() -> int:
    """Processes and threads on this machine now; 0 where it does not say."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            return int(file.read().split()[3].split("/")[1])
    except (OSError, ValueError, IndexError):
        return 0
