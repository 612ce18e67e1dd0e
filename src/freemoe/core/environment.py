"""The machine that a run stands on, for its record."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from freemoe.core.errors import RecipeError

DECIDING = ("freemoe", "torch", "transformers")
"""Packages whose version can change what a unit of work gives."""

_PACKAGES = ("freemoe", "torch", "transformers", "lm-eval", "scikit-learn", "scipy", "numpy", "safetensors")

# What this process measured of its machine, by name.
_MEASURED: dict[str, float] = {}


def note_measured(name: str, value: float) -> None:
    """Keep a figure of the machine that decided something, for the record of the run."""
    _MEASURED[name] = round(value, 3)


def package_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of those of some packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def describe_environment() -> dict[str, Any]:
    """Versions, machine and what was measured of it, for the record of a run; no host name, no user, no path."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": next(names, "") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "packages": package_versions(),
        **({"measured": dict(_MEASURED)} if _MEASURED else {}),
    }


def require_cores(what: str, count: int) -> None:
    """Refuse more threads or processes than a machine can make use of; far too many of them end a process without a word.

    Raises:
        RecipeError: More than four for every core, and more than 16.
    """
    cores = os.cpu_count() or 1
    most = max(16, 4 * cores)
    if count > most:
        raise RecipeError(f"{what} is {count:,}; this machine has {cores} cores, and at most {most} are allowed on it.")


def use_threads(count: int | None) -> None:
    """Let torch use so many threads; its own number if None. Errors as of `require_cores`."""
    import torch

    if count:
        require_cores("threads", count)
        torch.set_num_threads(count)
