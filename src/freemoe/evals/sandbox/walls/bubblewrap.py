"""Bubblewrap, where it is installed: the same tree and namespaces by a program that may have them where we may not."""

from __future__ import annotations

import shutil

from freemoe.evals.sandbox.walls import DISK, SHARED


def found() -> str | None:
    """Path of ``bwrap``; None where there is none."""
    return shutil.which("bwrap")


def command(bwrap: str, folder: str, read: list[str]) -> list[str]:
    """What to write before a command, so that it runs inside.

    Args:
        bwrap: Its path.
        folder: The private folder, which is a tmpfs of limited size inside.
        read: Files and folders that are bound into the tree, read-only.
    """
    words = [bwrap, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--dev", "/dev"]
    for path in read:
        words += ["--ro-bind", path, path]
    words += ["--size", str(SHARED), "--tmpfs", "/dev/shm", "--size", str(DISK), "--tmpfs", folder]
    # What bubblewrap itself makes is a tmpfs without a size.
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder, "--"]
