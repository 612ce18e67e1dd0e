"""The process that Python's fork server keeps: it has no public way to be ended before its own time."""

from __future__ import annotations

from multiprocessing import forkserver


def stop_forkserver() -> None:
    """End it, where it runs: the next process is forked from a new one, with this moment's environment and preloads."""
    forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
