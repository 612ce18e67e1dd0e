"""The machine that a run stands on, and the memory that it takes."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

DECIDING = ("freemoe", "torch", "transformers")
"""Packages whose version can change what a unit of work gives."""

_PACKAGES = ("freemoe", "torch", "transformers", "lm-eval", "scikit-learn", "scipy", "numpy", "safetensors")

# What this process measured of its machine, by name.
_MEASURED: dict[str, float] = {}


def note_measured(name: str, value: float) -> None:
    """Keep a figure of the machine that decided something, for the record of the run."""
    _MEASURED[name] = round(value, 3)


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of those of some packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def environment() -> dict[str, Any]:
    """Versions, machine and what was measured of it, for the record of a run; no host name, no user, no path."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "packages": versions(),
        **({"measured": dict(_MEASURED)} if _MEASURED else {}),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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
