"""Which walls stand here, and hostile programs against each combination of them; right programs, which must pass.

An effect is anything that a program changed outside, a visit to a socket, a secret that it could tell, more memory or disk than
its share. A parent that does not answer in time is harmed. Every program has a test behind it that fails, so any pass is false.
"""

from __future__ import annotations

import math
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from freemoe.bench.harness import Figure, Outcome, Settings, in_turns
from freemoe.bench.sandbox.programs.files import FILES
from freemoe.bench.sandbox.programs.processes import EXCESS, NETWORK, PROCESSES
from freemoe.bench.sandbox.programs.right import RIGHT, WITH_PROCESSES
from freemoe.bench.sandbox.programs.verdicts import EQUAL, EQUAL_TEST, ITS_OWN_TEST, VERDICTS
from freemoe.bench.sandbox.witness import Witness
from freemoe.core.errors import SandboxError
from freemoe.evals.sandbox.runner import WALLS, Result, run_tests
from freemoe.evals.sandbox.usage import below, held, resident
from freemoe.evals.sandbox.walls import DISK, KEEP_FILES
from freemoe.evals.sandbox.walls.bubblewrap import found as found_bwrap

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
TIME = "processor time"
QUICK = (
    "dir_fd",
    "sqlite3",
    "mkfifo",
    "another interpreter, without the hook",
    "read a secret",
    "stop the parent",
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
    """Every program against every combination of walls; then what the walls cost a program."""
    here = standing()
    sets = combinations_of(tuple(here.walls))
    if settings.quick:
        sets = [walls for walls in sets if len(walls) == 1] + sets[-1:]
    chosen = [
        (kind, name) for kind, of_kind in PROGRAMS.items() for name in of_kind if not settings.quick or name in QUICK
    ]
    found, witness = Found(), Witness()
    try:
        for walls in sets:
            with settings.progress.stage(f"against {', '.join(walls)}", len(chosen)) as done:
                for kind, name in chosen:
                    attack(witness, walls, kind, name, found)
                    done(1)
            be_right(witness, walls, settings.quick, found)
    finally:
        witness.close()
    cost = costs(settings, here.walls)
    details = {
        "walls": here.walls,
        "absent": dict(here.absent),
        "combinations": sets,
        "programs": {kind: list(of_kind) for kind, of_kind in PROGRAMS.items()},
        "right programs": [*RIGHT, *WITH_PROCESSES],
        "games of equality": list(EQUAL),
        "found": vars(found),
        "milliseconds": cost,
    }
    return Outcome(_figures(here, len(chosen) if sets else 0, len(sets), found, cost), details)


def _figures(here: Result, programs: int, sets: int, found: Found, cost: dict[str, float]) -> tuple[Figure, ...]:
    absent = "".join(f"; absent: {name} ({why})" for name, why in here.absent)
    asked = f"x {sets} combinations of walls" if sets else "no wall stands here that keeps files: none is run"
    games = f"{len(set(found.named))} games of equality, inherent to HumanEval, aside"

    def spent(side: str) -> float:
        return cost[f"{side}, processor"]

    def clock(side: str) -> float:
        return cost[f"{side}, clock"]

    def none(name: str, lines: list[str], note: str = "") -> Figure:
        told = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
        value = len(lines) if sets else math.nan
        return Figure(name, value, 0, "lower", "", 0, "; ".join(t for t in (told, note) if t))

    return (
        Figure("walls that stand here", len(here.walls), unit="", digits=0, note=", ".join(here.walls) + absent),
        Figure("hostile programs against each combination", programs, LEAST, unit="", digits=0, note=asked),
        none("effects outside", found.effects),
        none("false passes", found.false_passes, games),
        none("parent or other processes harmed", found.harmed),
        none("right programs failed", found.wrong, f"of {len({**RIGHT, **WITH_PROCESSES})}"),
        Figure(
            "start of a program beyond one without walls",
            spent("walls") - spent("none"),
            START,
            "lower",
            " ms",
            1,
            TIME,
        ),
        Figure("start of a program behind all walls", spent("walls"), unit=" ms", digits=1, note=TIME),
        Figure("start of a program behind none", spent("none"), unit=" ms", digits=1, note=TIME),
        Figure("start of the interpreter alone", spent("interpreter"), unit=" ms", digits=1, note=TIME),
        Figure("the first of these by the clock", clock("walls") - clock("none"), unit=" ms", digits=1),
    )


def standing() -> Result:
    """What stands here when everything is asked for, bubblewrap beside namespaces too."""
    here = run_tests("pass", walls=WALLS, unsafe=True)
    walls, absent = list(here.walls), list(here.absent)
    if found_bwrap():
        try:
            run_tests("pass", walls=("bubblewrap",))
            walls.append("bubblewrap")
        except SandboxError as error:
            absent.append(("bubblewrap", str(error)))
    else:
        absent.append(("bubblewrap", "no bwrap on the PATH"))
    return Result(here.passed, here.status, here.detail, tuple(walls), tuple(absent))


def combinations_of(walls: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every combination that programs are run behind, the weakest first: one that keeps files, and one tree at most."""
    asked = [w for w in ("namespaces", "bubblewrap", "landlock", "seccomp") if w in walls]
    sets = [c for size in range(1, len(asked) + 1) for c in combinations(asked, size)]
    sets = [c for c in sets if set(c) & set(KEEP_FILES) and not {"namespaces", "bubblewrap"} <= set(c)]
    # The strongest last: the one that is raised where nothing else is asked for.
    return sorted(sets, key=lambda c: (len(c), "namespaces" in c))


def attack(witness: Witness, walls: tuple[str, ...], kind: str, name: str, found: Found) -> None:
    """Run one hostile program and look at what it did."""
    where = f"{name} ({'+'.join(walls)})"
    text = PROGRAMS[kind][name]
    program, parent = witness.before(text + ("" if ITS_OWN_TEST in text else FAILING)), witness.parent
    before, health = witness.outside(), witness.health()
    with Peak(parent.process.pid, witness.temporary) as peak:
        answer = parent.run(program, walls, SECONDS, MEMORY)
    if name.startswith("a daemon"):
        time.sleep(2.2)
    after, later = witness.outside(), witness.health() if answer else {**health, "parent": "ended or hangs"}
    seen = [*sorted(after - before), *sorted(f"no longer: {line}" for line in before - after)]
    if answer and witness.secret in answer["detail"]:
        seen.append("told the secret")
    if peak.memory > 2 * MEMORY:
        seen.append(f"{peak.memory >> 20} MB of memory")
    if peak.disk > 4 * DISK:
        seen.append(f"{peak.disk >> 20} MB of files")
    hurt = [f"{who}: {later[who][:60]}" for who in later if later[who] != health[who]]
    found.effects += [f"{where}: {' | '.join(seen)}"] if seen else []
    found.harmed += [f"{where}: {', '.join(hurt)}"] if hurt else []
    found.false_passes += [where] if answer and answer["passed"] else []
    if seen or hurt:
        witness.mend()


def be_right(witness: Witness, walls: tuple[str, ...], quick: bool, found: Found) -> None:
    """Run the right programs, and the games that pass wherever tests stand beside programs."""
    processes = WITH_PROCESSES if {"namespaces", "bubblewrap"} & set(walls) else {}
    for name, program in {**RIGHT, **processes}.items():
        if quick and name not in QUICK_RIGHT:
            continue
        answer = witness.parent.run(program, walls, SECONDS_RIGHT, MEMORY)
        if answer is None or not answer["passed"]:
            found.wrong.append(f"{name} ({'+'.join(walls)}): {answer and answer['detail']}")
    for name, program in list(EQUAL.items())[: 1 if quick else None]:
        answer = witness.parent.run(program + EQUAL_TEST, walls, SECONDS_RIGHT, MEMORY)
        found.named += [name] if answer and answer["passed"] else []


class Peak:
    """The most memory and disk that everything below a process has had, looked at every 50 milliseconds in the block."""

    def __init__(self, process: int, folder: Path) -> None:
        self.process, self.folder, self.memory, self.disk = process, folder, 0, 0
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
            self.memory = max(self.memory, sum(map(resident, below(self.process))))
            self.disk = max(self.disk, held(str(self.folder), 10**5)[0])


def costs(settings: Settings, walls: tuple[str, ...]) -> dict[str, float]:
    """Milliseconds that a program which does nothing takes: behind all walls, behind none, in an interpreter alone."""
    asked = [w for w in walls if w in WALLS or (w == "bubblewrap" and "namespaces" not in walls)]
    sides = {
        "walls": lambda: run_tests("pass", walls=asked, unsafe=True),
        "none": lambda: run_tests("pass", walls=(), unsafe=True),
        "interpreter": lambda: subprocess.run([sys.executable, "-I", "-B", "-c", "pass"], check=False),
    }
    rounds = 2 if settings.quick else 6 * settings.repeats
    return {
        f"{name}, {told}": 1000 * statistics.median(values)
        for told, clock in (("processor", processor_time), ("clock", time.perf_counter))
        for name, values in in_turns(sides, rounds, clock=clock).items()
    }


def processor_time() -> float:
    """Seconds that this process and those that it has waited for have had of the processor."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(s.ru_utime + s.ru_stime for s in spent)
