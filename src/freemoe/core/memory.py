"""Memory of this process and machine: what is used, was used at most, is left, and how freed blocks go back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

# M_MMAP_THRESHOLD of mallopt(3).
_MMAP_THRESHOLD = -3
# Matrices of large models are larger, and most of what small ones make is smaller.
LARGE_BLOCK = 1 << 20


def peak_memory_bytes() -> int:
    """Most memory this process has held at once."""
    status = Path("/proc/self/status")
    if status.exists():
        # What `getrusage` says begins, in a process just started, at what the one that started it held.
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def used_memory_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def reset_peak_memory() -> None:
    """Let `peak_memory_bytes` count from now on, where the system can do that."""
    with contextlib.suppress(OSError):
        # 5 resets the high-water mark (proc(5)).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def available_memory_bytes() -> int:
    """Memory that this process can still take without swapping: the machine's, or its container's where that is less."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text(encoding="ascii").splitlines() if ":" in line)
        if "MemAvailable" in fields:
            pages = int(fields["MemAvailable"].split()[0]) * 1024
    return min([pages, *_left_in_container()])


def _left_in_container(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What control groups leave, of version 2 and 1; empty where they set no limit."""
    left = []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            # Version 2 says "max" where there is no limit.
            left.append(max(0, int((root / limit).read_text()) - int((root / used).read_text())))
    return left


def keep_memory_low() -> None:
    """Let every freed block of `LARGE_BLOCK` bytes or more go back to the system at once; glibc only, for this process.

    By itself glibc raises that size to 32 MiB as such blocks are freed, and keeps what is smaller in a heap that large and
    small blocks tear to pieces: a backward pass of a large model then holds up to a third more than is alive.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGE_BLOCK)


def free_now() -> None:
    """Return what nobody holds any more to the system, as far as its allocator can."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
