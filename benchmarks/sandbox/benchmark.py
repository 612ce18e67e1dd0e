"""Hostile programs inside bubblewrap, and right ones, which must pass; then the same without isolation, as a control.

An effect is anything that a program changed outside, a visit to a socket, a secret that it could tell, more memory than its
share. A parent that does not answer in time is harmed. Every program has a test behind it that fails, so any pass is false.
Without isolation only those run that go for others, not for more than their share: they say that the attacks are real.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.harness import Figure, Outcome, Settings, in_turns
from benchmarks.sandbox.programs.files import FILES
from benchmarks.sandbox.programs.processes import EXCESS, NETWORK, PROCESSES
from benchmarks.sandbox.programs.right import RIGHT, WITH_PROCESSES
from benchmarks.sandbox.programs.verdicts import EQUAL, EQUAL_TEST, ITS_OWN_TEST, VERDICTS
from benchmarks.sandbox.witness import Witness
from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox.bubblewrap import find_bwrap
from freemoe.evals.sandbox.process import Isolation
from freemoe.evals.sandbox.runner import run_tests
from freemoe.evals.sandbox.usage import descendants

PROGRAMS: Mapping[str, Mapping[str, str]] = {
    "files": FILES,
    "processes": PROCESSES,
    "network": NETWORK,
    "excess": EXCESS,
    "verdicts": VERDICTS,
}
FAILING = "\nassert sorted([2, 1]) == [2, 1]\nafter = 1\nafterwards = 2\n"
SECONDS, SECONDS_RIGHT = 0.6, 10.0
MEMORY = 1 << 30
LEAST, START = 60, 30.0
WITHOUT = ("files", "processes", "network")
"""Kinds that are run without isolation too."""
QUICK = (
    "dir_fd",
    "sqlite3",
    "mkfifo",
    "another interpreter, without the hook",
    "read a secret",
    "kill",
    "TCP",
    "the token in frames",
)
QUICK_RIGHT = ("asyncio", "files and folders", "a pool of processes")


@dataclass
class Found:
    """What the programs did, a line for each that did something."""

    effects: list[str] = field(default_factory=list)
    false_passes: list[str] = field(default_factory=list)
    harmed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)


def run(settings: Settings) -> Outcome:
    """Every program inside bubblewrap, most of them without it; then what it costs a program."""
    error = ""
    try:
        find_bwrap()
    except SandboxError as why:
        error = str(why)
    places: list[Isolation] = [] if error else ["bubblewrap", "none"]
    found: dict[Isolation, Found] = {place: Found() for place in places}
    chosen = [
        (kind, name) for kind, of_kind in PROGRAMS.items() for name in of_kind if not settings.quick or name in QUICK
    ]
    witness = Witness()
    try:
        for place in places:
            programs = [c for c in chosen if place == "bubblewrap" or c[0] in WITHOUT]
            with settings.progress.stage(f"isolation: {place}", len(programs)) as done:
                for kind, name in programs:
                    attack(witness, place, kind, name, found[place])
                    done(1)
            be_right(witness, place, settings.quick, found[place])
    finally:
        witness.close()
    cost = costs(settings, places)
    details = {
        "error": error,
        "programs": {kind: list(of_kind) for kind, of_kind in PROGRAMS.items()},
        "right programs": [*RIGHT, *WITH_PROCESSES],
        "games of equality": list(EQUAL),
        "found": {place: vars(what) for place, what in found.items()},
        "milliseconds": cost,
    }
    return Outcome(_figures(error, len(chosen), found, cost), details)


def _figures(error: str, programs: int, outcomes: dict[Isolation, Found], cost: dict[str, float]) -> tuple[Figure, ...]:
    found, control = outcomes.get("bubblewrap", Found()), outcomes.get("none", Found())
    games = f"{len(set(found.named))} games of equality, inherent to HumanEval, aside"

    def none(name: str, lines: list[str], note: str = "") -> Figure:
        told = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
        value = math.nan if error else len(lines)
        return Figure(name, value, 0, "lower", "", 0, "; ".join(t for t in (told, note) if t))

    return (
        Figure("hostile programs", 0 if error else programs, LEAST, unit="", digits=0, note=error),
        none("effects outside", found.effects),
        none("false passes", found.false_passes, games),
        none("parent or other processes harmed", found.harmed),
        none("right programs failed", [*found.wrong, *control.wrong], f"of {len({**RIGHT, **WITH_PROCESSES})}"),
        Figure(
            "programs with an effect or harm where nothing isolates them",
            len(control.effects) + len(control.harmed),
            unit="",
            digits=0,
            note="the control: what the same programs do to a stand-in of the machine",
        ),
        Figure(
            "start of a program beyond one without isolation",
            cost["bubblewrap"] - cost["none"],
            START,
            "lower",
            " ms",
            1,
        ),
        Figure("start of a program in bubblewrap", cost["bubblewrap"], unit=" ms", digits=1),
        Figure("start of a program without isolation", cost["none"], unit=" ms", digits=1),
        Figure("start of the interpreter alone", cost["interpreter"], unit=" ms", digits=1),
    )


def attack(witness: Witness, isolation: Isolation, kind: str, name: str, found: Found) -> None:
    """Run one hostile program and look at what it did."""
    where = f"{name} ({isolation})"
    text = PROGRAMS[kind][name]
    program, parent = witness.before(text + ("" if ITS_OWN_TEST in text else FAILING)), witness.parent
    before, health = witness.outside(), witness.health()
    with Peak(parent.process.pid) as peak:
        answer = parent.run(program, isolation, SECONDS, MEMORY)
    if name.startswith("a daemon"):
        time.sleep(2.2)
    after, later = witness.outside(), witness.health() if answer else {**health, "parent": "ended or hangs"}
    seen = [*sorted(after - before), *sorted(f"no longer: {line}" for line in before - after)]
    if answer and witness.secret in answer["detail"]:
        seen.append("told the secret")
    if peak.memory > 2 * MEMORY:
        seen.append(f"{peak.memory >> 20} MB of memory")
    hurt = [f"{who}: {later[who][:60]}" for who in later if later[who] != health[who]]
    found.effects += [f"{where}: {' | '.join(seen)}"] if seen else []
    found.harmed += [f"{where}: {', '.join(hurt)}"] if hurt else []
    found.false_passes += [where] if answer and answer["passed"] else []
    if seen or hurt:
        witness.mend()


def be_right(witness: Witness, isolation: Isolation, quick: bool, found: Found) -> None:
    """Run the right programs, and the games that pass wherever tests stand beside programs."""
    for name, program in {**RIGHT, **WITH_PROCESSES}.items():
        if quick and name not in QUICK_RIGHT:
            continue
        answer = witness.parent.run(program, isolation, SECONDS_RIGHT, MEMORY)
        if answer is None or not answer["passed"]:
            found.wrong.append(f"{name} ({isolation}): {answer and answer['detail']}")
    for name, program in list(EQUAL.items())[: 1 if quick else None]:
        answer = witness.parent.run(program + EQUAL_TEST, isolation, SECONDS_RIGHT, MEMORY)
        found.named += [name] if answer and answer["passed"] else []


class Peak:
    """The most memory that everything below a process has had, looked at every 50 milliseconds in the block.

    Memory that no process shows is looked for where the kernel counts it for the whole machine.
    """

    def __init__(self, process: int) -> None:
        self.process, self.memory, self._begun = process, 0, _machine_shared()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            below = sum(map(_proportional, descendants(self.process)))
            self.memory = max(self.memory, below, _machine_shared() - self._begun)


def _kilobytes(path: str, name: str) -> int:
    with contextlib.suppress(OSError):
        lines = Path(path).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
    return 0


def _proportional(process: int) -> int:
    return _kilobytes(f"/proc/{process}/smaps_rollup", "Pss:") << 10


def _machine_shared() -> int:
    return _kilobytes("/proc/meminfo", "Shmem:") << 10


def costs(settings: Settings, places: list[Isolation]) -> dict[str, float]:
    """Milliseconds by the clock that a program which does nothing takes: in bubblewrap, without, in an interpreter alone.

    Processor time is no measure: what bubblewrap starts is waited for by a process that ends with it.
    """
    sides: dict[str, Callable[[], object]] = {
        **{place: partial(run_tests, "pass", isolation=place) for place in places},
        "interpreter": lambda: subprocess.run([sys.executable, "-I", "-B", "-c", "pass"], check=False),
    }
    rounds = 2 if settings.quick else 6 * settings.repeats
    times = in_turns(sides, rounds, clock=time.perf_counter)
    return dict.fromkeys(("bubblewrap", "none"), math.nan) | {
        name: 1000 * statistics.median(values) for name, values in times.items()
    }
