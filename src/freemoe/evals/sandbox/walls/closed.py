"""The process that has a program run, closed to the looks of other processes of its user."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from freemoe.evals.sandbox.walls.kernel import LINUX, PR_GET_DUMPABLE, PR_SET_DUMPABLE, prctl

_lock = threading.Lock()
_closed = 0
_before = 0


@contextmanager
def memory_closed() -> Iterator[None]:
    """Inside the block no other process of the same user can look into this one (it is not dumpable)."""
    global _closed, _before
    if not LINUX:
        yield
        return
    with _lock:
        if _closed == 0:
            _before = prctl(PR_GET_DUMPABLE)
            prctl(PR_SET_DUMPABLE, 0)
        _closed += 1
    try:
        yield
    finally:
        with _lock:
            _closed -= 1
            # 2 cannot be set by anyone; it is as good as 0.
            if _closed == 0 and _before == 1:
                prctl(PR_SET_DUMPABLE, 1)
