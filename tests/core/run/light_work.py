"""Functions that units of work name, in a module that a new process imports in no time."""

import os
import time
from pathlib import Path


def leaves(code):
    os._exit(code)


def hangs(folder, times):
    """Never come back, so many times in all."""
    mark = Path(folder) / f"{len(list(Path(folder).iterdir()))}"
    if int(mark.name) < times:
        mark.touch()
        time.sleep(600)
    return "awake"


def where(number, wait):
    """A square, and the node of Ray that it was made on."""
    import ray

    time.sleep(wait)
    return number**2, ray.get_runtime_context().get_node_id()
