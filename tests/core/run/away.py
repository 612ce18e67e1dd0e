"""Workers that do not see the run's folder, without any process: what they are sent and send back is all that passes."""

import os
import time
from dataclasses import dataclass
from pathlib import Path


def soon(asked, seconds=150):
    """The answer as soon as it is not empty; the last one after so many seconds."""
    until = time.monotonic() + seconds
    while not (found := asked()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def runs(number):
    """Whether a process runs; one that nobody has asked for its end yet does not."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{number}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


class SerialExecutor:
    """Does units in this process, one after the other."""

    def run(self, units):
        for unit in units:
            yield unit, unit.work()

    def close(self):
        pass


@dataclass(frozen=True)
class Held:
    blob: bytes

    def get(self):
        return self.blob


class SerialAway(SerialExecutor):
    """Does units here, as if it were elsewhere."""

    count = 1

    def __init__(self, *asked, **more):
        self.shared = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def share(self, blob):
        self.shared.append(blob)
        return Held(blob)
