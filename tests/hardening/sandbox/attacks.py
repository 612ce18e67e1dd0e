"""Hostile programs inside bubblewrap, and right ones, which must pass; then the same without isolation, as a control.

The programs are text in ``programs/``. ``OUTSIDE`` (a folder that is not theirs), ``VICTIM`` (a process that is not theirs),
``PORT`` and ``MARK`` (a name that is looked for afterwards) stand before each as assignments. They do no harm where they
succeed: they leave a file, stop a process that was started for it, reach a socket that waits for them.

An effect is anything that a program changed outside, a visit to a socket, a secret that it could tell, more memory than its
share. A parent that does not answer in time is harmed. Every program has a test behind it that fails, so any pass is false.
Without isolation only those run that go for others, not for more than their share: they say that the attacks are real.
"""

import contextlib
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from benchmarks.harness import Figure, Outcome, in_turns
from freemoe.evals.sandbox.runner import run_tests
from freemoe.evals.sandbox.usage import descendant_processes
from tests.hardening.full import count, none
from tests.hardening.sandbox.witness import Witness
from tests.hardening.worker import Sampled


def read_programs(kind):
    """Programs by name, as they stand in ``programs/KIND.yaml``."""
    path = Path(__file__).with_name("programs") / f"{kind}.yaml"
    programs = yaml.safe_load(path.read_text(encoding="utf-8"))
    hunt = programs.pop("HUNT", "")
    return {name: program.replace("HUNT\n", hunt, 1) for name, program in programs.items()}


ALONE = ("files", "processes", "network")
"""Kinds that are run without isolation too."""

PROGRAMS = {kind: read_programs(kind) for kind in (*ALONE, "excess", "verdicts")}
RIGHT, EQUAL = read_programs("right"), read_programs("equal")
FAILING = "\nassert sorted([2, 1]) == [2, 1]\nafter = 1\nafterwards = 2\n"
EQUAL_TEST = "\nassert f(1) == 22\n"
ITS_OWN_TEST = "# its own test fails in the first process"
"""Stands in programs whose test is a part of them."""

SECONDS, SECONDS_RIGHT = 0.6, 10.0
MEMORY = 1 << 30
LEAST, START = 60, 30.0
ROUNDS = 30


@dataclass
class Found:
    """What the programs did, a line for each that did something."""

    effects: list[str] = field(default_factory=list)
    false_passes: list[str] = field(default_factory=list)
    harmed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)


def run(wanted=lambda name: True, rounds=ROUNDS):
    """Every program that is wanted inside bubblewrap, most of them without it; then what it costs a program."""
    found = {"bubblewrap": Found(), "none": Found()}
    chosen = [(kind, name) for kind, of_kind in PROGRAMS.items() for name in of_kind if wanted(name)]
    with contextlib.closing(Witness()) as witness:
        for isolation, what in found.items():
            for kind, name in chosen:
                if isolation == "bubblewrap" or kind in ALONE:
                    attack(witness, isolation, kind, name, what)
            be_right(witness, isolation, wanted, what)
    cost = costs(rounds)
    details = {
        "programs": {kind: list(of_kind) for kind, of_kind in PROGRAMS.items()},
        "right programs": [*RIGHT],
        "games of equality": list(EQUAL),
        "found": {isolation: vars(what) for isolation, what in found.items()},
        "milliseconds": cost,
    }
    return Outcome(_figures(len(chosen), *found.values(), cost), details)


def _figures(programs, found, control, cost):
    beyond = cost["bubblewrap"] - cost["none"]
    games = f"{len(set(found.named))} games of equality, inherent to HumanEval, aside"

    def nothing(name, lines, note=""):
        told = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
        return none(name, len(lines), "; ".join(t for t in (told, note) if t))

    return (
        count("hostile programs", programs, LEAST),
        nothing("effects outside", found.effects),
        nothing("false passes", found.false_passes, games),
        nothing("parent or other processes harmed", found.harmed),
        nothing("right programs failed", [*found.wrong, *control.wrong], f"of {len(RIGHT)}"),
        count(
            "programs with an effect or harm where nothing isolates them",
            len(control.effects) + len(control.harmed),
            note="the control: what the same programs do to a stand-in of the machine",
        ),
        Figure("start of a program beyond one without isolation", beyond, START, "lower", " ms", 1),
        Figure("start of a program in bubblewrap", cost["bubblewrap"], unit=" ms", digits=1),
        Figure("start of a program without isolation", cost["none"], unit=" ms", digits=1),
        Figure("start of the interpreter alone", cost["interpreter"], unit=" ms", digits=1),
    )


def attack(witness, isolation, kind, name, found):
    """Run one hostile program and look at what it did."""
    where = f"{name} ({isolation})"
    text = PROGRAMS[kind][name]
    program, parent = witness.before(text + ("" if ITS_OWN_TEST in text else FAILING)), witness.parent
    before, health = witness.outside(), witness.health()
    shared = _machine_shared()

    def memory():
        # Memory that no process shows is looked for where the kernel counts it for the whole machine.
        return max(sum(map(_proportional, descendant_processes(parent.process.pid))), _machine_shared() - shared)

    with Sampled(memory, 0.05) as sampled:
        answer = parent.run(program, isolation, SECONDS, MEMORY)
    if name.startswith("a daemon"):
        time.sleep(2.2)
    after, later = witness.outside(), witness.health() if answer else {**health, "parent": "ended or hangs"}
    seen = [*sorted(after - before), *sorted(f"no longer: {line}" for line in before - after)]
    if answer and witness.secret in answer["detail"]:
        seen.append("told the secret")
    peak = max(sampled.seen, default=0)
    if peak > 2 * MEMORY:
        seen.append(f"{peak >> 20} MB of memory")
    hurt = [f"{who}: {later[who][:60]}" for who in later if later[who] != health[who]]
    found.effects += [f"{where}: {' | '.join(seen)}"] if seen else []
    found.harmed += [f"{where}: {', '.join(hurt)}"] if hurt else []
    found.false_passes += [where] if answer and answer["passed"] else []
    if seen or hurt:
        witness.mend()


def be_right(witness, isolation, wanted, found):
    """Run the right programs, and the games that pass wherever tests stand beside programs."""
    for name in filter(wanted, RIGHT):
        answer = witness.parent.run(RIGHT[name], isolation, SECONDS_RIGHT, MEMORY)
        if answer is None or not answer["passed"]:
            found.wrong.append(f"{name} ({isolation}): {answer and answer['detail']}")
    for name in filter(wanted, EQUAL):
        answer = witness.parent.run(EQUAL[name] + EQUAL_TEST, isolation, SECONDS_RIGHT, MEMORY)
        found.named += [name] if answer and answer["passed"] else []


def _kilobytes(path, name):
    with contextlib.suppress(OSError):
        lines = Path(path).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
    return 0


def _proportional(process):
    return _kilobytes(f"/proc/{process}/smaps_rollup", "Pss:") << 10


def _machine_shared():
    return _kilobytes("/proc/meminfo", "Shmem:") << 10


def costs(rounds):
    """Milliseconds by the clock that a program which does nothing takes: in bubblewrap, without, in an interpreter alone.

    Processor time is no measure: what bubblewrap starts is waited for by a process that ends with it.
    """
    sides = {
        "bubblewrap": partial(run_tests, "pass"),
        "none": partial(run_tests, "pass", isolation="none"),
        "interpreter": lambda: subprocess.run([sys.executable, "-I", "-B", "-c", "pass"], check=False),
    }
    return {name: 1000 * statistics.median(values) for name, values in in_turns(sides, rounds).items()}
