"""What a program may read: its interpreter, the packages beside it, and what the C library and the clock need."""

from __future__ import annotations

import os
import sys

SYSTEM = (
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/nix/store",
    "/sys/devices/system/cpu",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def readable(path: list[str]) -> list[str]:
    """Files and folders that exist, none inside another one.

    Args:
        path: ``sys.path`` of the interpreter; entries that do not exist count for nothing.
    """
    asked = [*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, *path]
    found = {os.path.abspath(p) for p in asked if p and os.path.exists(p)}
    found |= {os.path.realpath(p) for p in found}
    found.discard("/")
    return sorted(p for p in found if not any(p.startswith(other + os.sep) for other in found))
