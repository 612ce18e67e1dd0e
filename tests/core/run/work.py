"""Functions that units of work name: they must stand in a module that other processes can import."""

import os
import signal
import time
from pathlib import Path

import torch

from freemoe.core.errors import NumericError
from freemoe.core.run.folder import RunPart

CALLS = []


def square(number, wait=0.0):
    time.sleep(wait)
    return {"square": number**2, "tensor": torch.arange(number)}


def calls(number):
    """This process and how often it was here."""
    CALLS.append(number)
    return os.getpid(), len(CALLS)


def threads():
    return torch.get_num_threads()


def fails(kind):
    if kind == "numeric":
        raise NumericError("a loss is NaN")

    class Local(Exception):
        """One that another process cannot know."""

    raise Local("from far away")


def dies(folder, times, number=9):
    """Kill this process, so many times in all."""
    mark = Path(folder) / f"{len(list(Path(folder).iterdir()))}"
    if int(mark.name) < times:
        mark.touch()
        os.kill(os.getpid(), number)
        time.sleep(60)
    return "alive"


def writes(output, unit, dies_after=None, starts=None):
    """Finish three units of a run that another process keeps; every process that begins leaves a mark in ``starts``."""
    if starts is not None:
        Path(starts, str(os.getpid())).touch()
    run = RunPart(output, unit)
    for number in range(3):
        if number == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        run.journal.run_unit(f"{unit}/{number}", lambda number=number: number)
    run.run_tensor_unit(f"{unit}/tensor", lambda: {"a": torch.ones(2)})


def sleeps(mark):
    (Path(mark + ".part")).write_text(str(os.getpid()))
    Path(mark + ".part").replace(mark)
    time.sleep(600)


def weighs(parcel, folder, times):
    """Bytes of an argument that lies elsewhere, after so many deaths."""
    size = len(parcel.get())
    dies(folder, times)
    return size


def part(output, stage, name, times, fails=""):
    """Read what the run has, and finish so many lines and a tensor of it."""
    run = RunPart(output, f"{stage}|{name}")
    common = run.run_tensor_unit("common", dict)["a"]
    for number in range(times):
        run.journal.run_unit(f"{stage}|{name}/{number}", lambda: float(common.sum()))
    if name == fails:
        raise NumericError("a loss is NaN")
    run.run_tensor_unit(f"{stage}|{name}/found", lambda: {"sum": torch.stack([common.sum(), torch.tensor(0.0)])})
