"""Runs of every system are killed (SIGKILL) at their own writes, and go on to the same bytes.

A place is a write of the run's journal, of a unit's tensors or state, or of a file of the artefact: before it, in its middle
with half of the bytes on disk, or right behind it. Every place is a run of its own, killed there, and gone on with by the same
command; then both folders are compared. One more run of each system is killed after every single thing that it keeps, over and over.
"""

import json
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.harness import Figure, Outcome
from freemoe.core.errors import FreeMoEError
from tests.hardening.full import count
from tests.hardening.kill.compare import differences
from tests.hardening.kill.dying import FIRST_KEPT, NOTED
from tests.hardening.kill.places import kind, places
from tests.hardening.kill.systems import OUTPUT, prepare

PLACES = 60


@dataclass
class Tally:
    """What became of one system's kills."""

    writes: int = 0  # of the run that nobody kills
    seconds_of_a_run: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)  # by stage and kind of the place
    wrong: dict[str, str] = field(default_factory=dict)  # by place
    processes: int = 0  # of the run that is killed after every write


def outcome(tallies, wanted):
    """The figures of every system's kills, at so many places each."""
    kills = sum(tally.kills.total() for tally in tallies.values())
    wrong = sum(len(tally.wrong) for tally in tallies.values())
    figures = [
        count(f"kill points, {name}", t.kills.total(), wanted, f"{t.writes} writes, {len(t.kills)} kinds")
        for name, t in tallies.items()
    ]
    figures.append(Figure("identical bytes", 100 * (1 - wrong / kills) if kills else 0.0, 100.0, unit=" %", digits=1))
    figures += [
        count(f"processes of a run killed whenever it has kept something, {name}", t.processes)
        for name, t in tallies.items()
    ]
    return Outcome(tuple(figures), {name: vars(tally) for name, tally in tallies.items()})


def kill_system(runs, name, scratch, wanted):
    """Kill one system's run at so many places, and one more run whenever it has kept something."""
    whole = scratch / "whole"
    prepare(whole)
    began = time.perf_counter()
    runs.run(name, whole, noted=True)
    seconds = time.perf_counter() - began
    events = [tuple(event) for event in json.loads((whole / NOTED).read_text(encoding="utf-8"))]
    tally = Tally(len(events), round(seconds, 2))
    chosen = places(events, wanted)

    def one(number):
        folder = scratch / f"killed at {number}"
        try:
            return _killed_once(runs, name, folder, whole, number)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    with ThreadPoolExecutor(runs.side_by_side) as pool:
        for number, trouble in zip(chosen, pool.map(one, chosen), strict=True):
            tally.kills[kind(events[number])] += 1
            if trouble:
                tally.wrong[f"{number} {' '.join(events[number])}"] = trouble
    tally.processes, trouble = _killed_always(runs, name, scratch / "always", whole, len(events))
    if trouble:
        tally.wrong["after every write"] = trouble
    return tally


def _killed_once(runs, name, folder, whole, number):
    """Kill a run at a write and go on with it; says what is wrong with the end, empty where nothing is."""
    prepare(folder)
    try:
        if runs.run(name, folder, dies_at=number) != -signal.SIGKILL:
            return "the run ended before that write"
        runs.run(name, folder)
    except FreeMoEError as error:
        return str(error)
    return _compared(folder, whole)


def _killed_always(runs, name, folder, whole, events):
    """Kill a run each time that it has kept one thing more; returns how many processes it took, and what is wrong."""
    prepare(folder)
    lives = 0
    for lives in range(1, events + 2):
        try:
            if runs.run(name, folder, dies_at=FIRST_KEPT) == 0:
                return lives, _compared(folder, whole)
        except FreeMoEError as error:
            return lives, str(error)
    return lives, "it never came to its end"


def _compared(folder, whole):
    left = [p.name for p in folder.iterdir() if p.name.startswith(OUTPUT) and p.name != OUTPUT]
    return "; ".join([*differences(whole / OUTPUT, folder / OUTPUT), *(f"{p} is left over" for p in left)])
