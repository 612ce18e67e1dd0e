"""`python -m benchmarks kill`: runs of every system are killed (SIGKILL) at their own writes, and go on to the same bytes.

A place is a write of the run's journal, of a unit's tensors or state, or of a file of the artefact: before it, in its middle
with half of the bytes on disk, or right behind it. Every place is a run of its own, killed there, and gone on with by the same
command; then both folders are compared. One more run of each system is killed
after every single thing that it keeps, over and over.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, Outcome, Settings
from benchmarks.kill.compare import differences
from benchmarks.kill.dying import FIRST_KEPT, NOTED, Event, processes, run_in
from benchmarks.kill.places import kind, longest_unit, places
from benchmarks.kill.systems import OUTPUT, RECIPES, prepare
from freemoe.core.errors import FreeMoEError

PLACES, QUICK_PLACES = 60, 3
_QUICK = ("build", "trim")


@dataclass
class Tally:
    """What became of one system's kills.

    Attributes:
        events: Writes of the run that nobody kills.
        seconds: That it takes.
        kinds: Stage and kind of every place -> kills there.
        bad: What went wrong, by place.
        lives: Processes of the run that is killed after every write.
    """

    events: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    longest: str = ""
    bad: dict[str, str] = field(default_factory=dict)
    lives: int = 0


def run(settings: Settings) -> Outcome:
    """Kill runs of every system at their writes."""
    count = QUICK_PLACES if settings.quick else PLACES
    wanted = [name for name in RECIPES if settings.wants(name) and (not settings.quick or name in _QUICK)]
    with processes() as context, tempfile.TemporaryDirectory() as scratch:
        tallies = {name: _system(context, name, Path(scratch), count, settings) for name in wanted}
    kills = sum(t.kinds.total() for t in tallies.values())
    bad = sum(len(t.bad) for t in tallies.values())
    figures = [
        Figure(
            f"kill points, {name}", t.kinds.total(), PLACES, "higher", "", 0, f"{t.events} writes, {len(t.kinds)} kinds"
        )
        for name, t in tallies.items()
    ]
    figures.append(Figure("identical bytes", 100 * (1 - bad / kills) if kills else 0.0, 100.0, "higher", " %", 1))
    figures += [
        Figure(f"processes of a run killed whenever it has kept something, {name}", t.lives, None, "lower", "", 0)
        for name, t in tallies.items()
        if t.lives
    ]
    return Outcome(tuple(figures), {name: _told(t) for name, t in tallies.items()})


def _told(tally: Tally) -> dict[str, Any]:
    return {
        "writes": tally.events,
        "seconds_of_a_run": round(tally.seconds, 2),
        "longest_unit": tally.longest,
        "kills": dict(sorted(tally.kinds.items())),
        "wrong": tally.bad,
        "processes": tally.lives,
    }


def _system(context: ForkServerContext, name: str, scratch: Path, count: int, settings: Settings) -> Tally:
    """Kill one system's run at so many places."""
    whole = scratch / name / "whole"
    prepare(whole)
    began = time.perf_counter()
    run_in(context, name, whole, noted=True)
    tally = Tally(seconds=time.perf_counter() - began)
    events: list[Event] = [(stage, what) for stage, what in json.loads((whole / NOTED).read_text(encoding="utf-8"))]
    tally.events, tally.longest = len(events), longest_unit(events)
    chosen = places(events, count)

    def one(number: int) -> tuple[int, str]:
        folder = scratch / name / f"killed at {number}"
        try:
            return number, _killed_once(context, name, folder, whole, number)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    with settings.progress.stage(f"kills, {name}", len(chosen)) as advance:
        with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
            for number, trouble in pool.map(one, chosen):
                tally.kinds[kind(events[number])] += 1
                if trouble:
                    tally.bad[f"{number} {' '.join(events[number])}"] = trouble
                advance(1)
        if not settings.quick:
            tally.lives, trouble = _killed_always(context, name, scratch / name / "always", whole, len(events))
            if trouble:
                tally.bad["after every write"] = trouble
    return tally


def _killed_once(context: ForkServerContext, name: str, folder: Path, whole: Path, number: int) -> str:
    """Kill a run at a write and go on with it; says what is wrong with the end, empty where nothing is."""
    prepare(folder)
    try:
        if run_in(context, name, folder, dies_at=number) != -signal.SIGKILL:
            return "the run ended before that write"
        run_in(context, name, folder)
    except FreeMoEError as error:
        return str(error)
    return _compared(folder, whole)


def _killed_always(context: ForkServerContext, name: str, folder: Path, whole: Path, events: int) -> tuple[int, str]:
    """Kill a run each time that it has kept one thing more; returns how many processes it took, and what is wrong."""
    prepare(folder)
    lives = 0
    for lives in range(1, events + 2):
        try:
            if run_in(context, name, folder, dies_at=FIRST_KEPT) == 0:
                return lives, _compared(folder, whole)
        except FreeMoEError as error:
            return lives, str(error)
    return lives, "it never came to its end"


def _compared(folder: Path, whole: Path) -> str:
    left = [p.name for p in folder.iterdir() if p.name.startswith(OUTPUT) and p.name != OUTPUT]
    return "; ".join([*differences(whole / OUTPUT, folder / OUTPUT), *(f"{p} is left over" for p in left)])
