"""`python -m benchmarks scale`: the same bytes wherever units are done, what two workers bring, what a unit costs, and 70B on paper."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gain.contest import cores
from benchmarks.harness import Figure, Outcome, Settings, in_turns, ratio
from benchmarks.scale.kill import Killer
from benchmarks.scale.simulation import PAPER, Measured, stops_at, table
from freemoe.core.run.places import ExecutorSpec
from freemoe.core.run.pool import WorkerPool
from freemoe.core.run.units import Unit
from freemoe.distributed.executors import has_ray, make_pool

WORK = "benchmarks.scale.work"
DEVICES = (8, 16, 32, 64, 128, 256, 512)
FILES = ("experts.safetensors", "router.safetensors", "seen.safetensors")
STAGES = {"signed purification": "purify", "search": "search", "report": "report"}


@dataclass
class _Found:
    """What was found so far: `simulation.Measured` is made of the last three."""

    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)
    unit_seconds: float = 0.0
    start_seconds: float = 0.0


def run(settings: Settings) -> Outcome:
    """Measure, then simulate with what was measured."""
    found = _Found()
    with_ray = has_ray()
    if not with_ray:
        found.details["ray"] = "not installed: pip install 'freemoe[ray]'"
    with tempfile.TemporaryDirectory() as folder:
        _bytes(settings, Path(folder), found, with_ray)
    places = {"processes": ExecutorSpec(workers=2), **({"Ray": ExecutorSpec(ray=True, workers=2)} if with_ray else {})}
    for name, place in places.items():
        _speed(settings, name, place, found)
    _paper(settings, found)
    return Outcome(tuple(found.figures), found.details)


# ----------------------------------------------------------------------------------- the same bytes


def _bytes(settings: Settings, folder: Path, found: _Found, with_ray: bool) -> None:
    """The bundled model's build by one process, by two, and on Ray with a worker killed."""
    from freemoe.domain_experts.demo import demo_recipe
    from freemoe.domain_experts.pipeline import build

    recipe = demo_recipe(str(folder / "one"), settings.seed, 24 if settings.quick else 120, threads=1)
    if settings.quick:
        two = {name: recipe.domains[name] for name in ("code", "math")}
        recipe = recipe.model_copy(update={"domains": two})
    clock = Clock()
    began = time.perf_counter()
    alone = build(recipe, progress=clock)
    found.details["build_seconds"] = {"one process": time.perf_counter() - began}
    found.passes = _passes(recipe, clock, time.perf_counter() - began)
    ways = {"two processes": "local:2", **({"Ray, a worker killed": "ray"} if with_ray else {})}
    for name, place in ways.items():
        began = time.perf_counter()
        asked = recipe.model_copy(update={"output": str(folder / place[:3]), "place": place, "workers": 2})
        with Killer() if place == "ray" else contextlib.nullcontext() as killer:
            other = build(asked)
        found.details["build_seconds"][name] = time.perf_counter() - began
        same = [file for file in FILES if (other / file).read_bytes() == (alone / file).read_bytes()]
        note = f"of {', '.join(FILES)}"
        if killer is not None:
            killed = (
                f"{len(killer.killed)} worker killed" if killer.killed else "no worker was found that could be killed"
            )
            note += f"; {killed}"
        figure = Figure(f"files equal to those of one process: {name}", len(same) / len(FILES), 1.0, unit="", note=note)
        found.figures.append(figure)


class Clock:
    """Progress that takes the time of every stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Any]:
        """Take the time of a stage."""
        began = time.perf_counter()
        yield lambda steps: None
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def say(self, line: str) -> None:
        """Nobody listens."""


def _passes(recipe: Any, clock: Clock, total: float) -> dict[str, float]:
    """What the stages of a build took, in forward passes over the documents that they are about."""
    from freemoe.domain_experts.context import prepare_context

    bench = prepare_context(recipe)
    took, scored = [], 0
    for _ in range(2):
        began, scored = time.perf_counter(), 0
        for name, data in bench.domains.items():
            bench.evaluators[name].score(data.reference.documents)
            scored += len(data.reference)
        took.append(time.perf_counter() - began)
    a_document = took[-1] / scored
    reported = sum(len(data.reported) for data in bench.domains.values())
    about = {"purify": scored, "search": scored, "report": reported}
    passes = {short: clock.seconds.get(stage, 0.0) / (about[short] * a_document) for stage, short in STAGES.items()}
    rest = total - sum(clock.seconds.get(stage, 0.0) for stage in STAGES)
    return {"begin": rest / (scored * a_document), **passes}


# ------------------------------------------------------------------------------ speed and overhead


def _speed(settings: Settings, name: str, place: ExecutorSpec, found: _Found) -> None:
    """What two workers bring over one, and what a unit costs that does nothing."""
    units = [
        Unit(f"score {n}", f"{WORK}:score", {"documents": 16, "length": 64, "times": 2 if settings.quick else 40})
        for n in range(4 if settings.quick else 16)
    ]
    idle = [Unit(f"nothing {n}", f"{WORK}:nothing", {}) for n in range(20 if settings.quick else 500)]
    with make_pool(place, threads=1) as workers:
        began = time.perf_counter()
        list(workers.run(idle[:2]))
        started = time.perf_counter() - began
        # Both workers have loaded the model before anything is timed.
        list(workers.run(units[:4]))
        seconds = in_turns(
            {"one": lambda: _with(workers, 1, units), "two": lambda: _with(workers, 2, units)}, settings.rounds
        )
        each = in_turns({"nothing": lambda: _with(workers, 1, idle)}, settings.rounds)
    cost = statistics.median(each["nothing"]) / len(idle)
    found.figures += [
        Figure(f"speed-up of two workers: {name}", ratio(seconds, "one", "two"), 1.7, note=f"on {cores()} cores"),
        Figure(f"overhead per unit: {name}", 1000 * cost, 10.0, "lower", " ms", note=f"{len(idle)} units, one worker"),
    ]
    found.details[name] = {"seconds": seconds, "overhead_seconds": cost, "start_seconds": started}
    if place.ray or not found.unit_seconds:
        found.unit_seconds, found.start_seconds = cost, started


def _with(workers: WorkerPool, count: int, units: list[Unit]) -> None:
    workers.count = count
    assert len(list(workers.run(units))) == len(units)


# ---------------------------------------------------------------------------------------- on paper


def _paper(settings: Settings, found: _Found) -> None:
    """70B, 64 domains, 8 to 512 devices."""
    measured = Measured(found.passes, found.unit_seconds, found.start_seconds)
    rows = {str(count): table(measured, count, DEVICES, settings.seed) for count in (1, 8)}
    found.details["simulation"] = {
        "inputs": {name: vars(found) for name, found in PAPER.items()},
        "measured": vars(measured),
        "rows_by_subdomains": rows,
    }
    for count, found_rows in rows.items():
        about = f"70B x 64 domains x {count} subdomain{'s' if count != '1' else ''}"
        first, last = found_rows[0], found_rows[-1]
        moved = {what: f"{size / 1e12:.2f} TB" for what, size in last["bytes"].items()}
        note = f"{last['speedup']:.1f}x; moved: " + ", ".join(f"{what} {size}" for what, size in moved.items())
        stop = f"{about}: devices beyond which twice as many are not 1.25x as fast, simulated"
        found.figures += [
            Figure(f"{about}, 8 devices, simulated", first["hours"], unit=" h", digits=1),
            Figure(f"{about}, 512 devices, simulated", last["hours"], unit=" h", digits=1, note=note),
            Figure(stop, stops_at(found_rows), unit="", digits=0),
        ]
