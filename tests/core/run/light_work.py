"""Functions that units of work name, in a module that a new process imports in no time."""

from __future__ import annotations

import time
from pathlib import Path


def hangs(folder: str, times: int) -> str:
    """Never come back, so many times in all."""
    mark = Path(folder) / f"{len(list(Path(folder).iterdir()))}"
    if int(mark.name) < times:
        mark.touch()
        time.sleep(600)
    return "awake"
