"""A build on a cluster, event by event: the units of its stages, the links that they wait for, and nothing else.

The stages, their order and what is sent are those of `freemoe.domain_experts` and `freemoe.core.run.away`; what a unit costs and how
fast a link is are inputs.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Input:
    """A number that the simulation is told, and where it is from."""

    value: float
    unit: str
    source: str


_ROWS = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))
PAPER: dict[str, Input] = {name: Input(value, unit, source) for name, (value, unit, source) in _ROWS.items()}
"""What is not measured here."""


@dataclass(frozen=True)
class Measured:
    """What is measured here and scaled."""

    passes: dict[str, float]  # By stage: its time, in forward passes over the documents that it is about
    unit_seconds: float  # What a unit costs beside its work
    start_seconds: float  # From asking for a worker until it takes its first unit, without loading the base


@dataclass(frozen=True)
class Part:
    """A unit of a stage."""

    seconds: float  # Of work, on one worker
    common: float  # Bytes that every unit of the build reads, fetched once per worker
    down: float  # Bytes that it fetches besides
    up: float  # Bytes that it sends back


@dataclass
class Link:
    """Something that bytes pass one after the other."""

    bytes_per_second: float
    free: float = 0.0
    moved: float = 0.0

    def pass_on(self, when: float, size: float) -> float:
        """When so many bytes are through that are there at a time."""
        begin = max(when, self.free)
        self.free = begin + size / self.bytes_per_second
        self.moved += size
        return self.free


@dataclass
class Run:
    """What a simulated build came to: seconds by stage, seconds in which workers worked, bytes moved by what they are."""

    workers: int
    seconds: dict[str, float] = field(default_factory=dict)
    work: float = 0.0
    bytes: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(self.seconds.values())


def stages(measured: Measured, subdomains: int, seed: int = 0) -> dict[str, list[Part]]:
    """The units of a build by stage, subdomains as unequal as clusters are; the first process alone does the first."""
    told = {name: found.value for name, found in PAPER.items()}
    domains, tokens = int(told["domains"]), told["tokens"]
    power = told["device_flops"] * told["utilisation"] * told["devices_per_worker"]
    document = 2 * told["parameters"] * tokens / power
    rng = random.Random(seed)
    sizes = []
    for _ in range(domains):
        drawn = [rng.lognormvariate(0, 0.5) for _ in range(subdomains)]
        sizes += [told["reference_documents"] * size / sum(drawn) for size in drawn]
    mask = told["parameters"] * told["off_share"] * told["place_bytes"]
    inputs = told["layers"] * (3 * told["hidden"] + told["width"])
    norms = 4 * inputs * told["norm_sets"] * len(sizes)
    features = 4 * told["hidden"] * told["reference_documents"] * domains
    common = norms + features
    costs = measured.passes
    everything = told["reference_documents"] * domains * document
    return {
        "begin": [Part(costs["begin"] * everything, 0, 0, 0)],
        "purify": [Part(costs["purify"] * size * document, common, 0, mask) for size in sizes],
        # A score is three numbers in a line of the journal.
        "search": [
            Part(costs["search"] * size * document, common, mask, 100 * size * costs["search"]) for size in sizes
        ],
        "report": [
            Part(costs["report"] * told["reported_documents"] * document, common, mask * len(sizes), 1e6)
            for _ in range(domains)
        ],
    }


class _Cluster:
    """Workers and links, and what happens to them in the order in which it happens."""

    def __init__(self, measured: Measured, devices: int) -> None:
        told = {name: found.value for name, found in PAPER.items()}
        self.measured = measured
        self.workers = max(1, devices // int(told["devices_per_worker"]))
        self.base = told["parameters"] * told["weight_bytes"]
        self.alone = self.base / told["storage_of_one"]
        self.storage, self.down, self.up = Link(told["storage"]), Link(told["link"]), Link(told["link"])
        self.handing = Link(1 / measured.unit_seconds if measured.unit_seconds else math.inf)
        self.has_common = set[int]()
        self.has_base = set[int]()

    def stage(self, clock: float, units: Sequence[Part], workers: int) -> float:
        """Do units from a time on; when the last one's answer is there."""
        waiting = list(reversed(units))
        # When, in which order, whose, what comes next, of which unit.
        order = itertools.count()
        events: list[tuple[float, int, int, str, Part | None]] = [
            (clock, next(order), number, "free", None) for number in range(workers)
        ]
        last = clock
        while events:
            when, _, number, step, unit = heapq.heappop(events)
            if step == "free":
                last = max(last, when)
                if not waiting:
                    continue
                unit = waiting.pop()
            assert unit is not None
            when, then = self._pass(when, number, step, unit)
            heapq.heappush(events, (when, next(order), number, then, unit))
        return last

    def _pass(self, when: float, number: int, step: str, unit: Part) -> tuple[float, str]:
        """Let a worker take a step of a unit: when it is done, and the next one."""
        if step == "free":
            return self.handing.pass_on(when, 1), "handed"
        if step == "handed":
            if number in self.has_base:
                return when, "loaded"
            self.has_base.add(number)
            return self.measured.start_seconds + max(self.storage.pass_on(when, self.base), when + self.alone), "loaded"
        if step == "loaded":
            size = unit.down + (0 if number in self.has_common else unit.common)
            self.has_common.add(number)
            return (self.down.pass_on(when, size) if size else when) + unit.seconds, "worked"
        return self.up.pass_on(when, unit.up), "free"


def simulate(parts: dict[str, list[Part]], measured: Measured, devices: int) -> Run:
    """Do the stages one after the other, each unit when a worker of the cluster is free; a stage ends with its last unit."""
    cluster = _Cluster(measured, devices)
    run, clock = Run(cluster.workers), 0.0
    for stage, units in parts.items():
        end = cluster.stage(clock, units, 1 if stage == "begin" else cluster.workers)
        # The first process writes down what comes back.
        end += sum(unit.up for unit in units) / PAPER["disk"].value
        run.seconds[stage] = end - clock
        run.work += sum(unit.seconds for unit in units)
        clock = end
    run.bytes = {"bases": cluster.storage.moved, "sent": cluster.down.moved, "back": cluster.up.moved}
    return run


def table(measured: Measured, subdomains: int, devices: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """A row for every size of the cluster: hours by stage, bytes, speed-up and efficiency over the smallest."""
    parts = stages(measured, subdomains, seed)
    runs = {count: simulate(parts, measured, count) for count in devices}
    first = runs[devices[0]]
    rows = []
    for count, run in runs.items():
        speedup = first.total / run.total
        rows.append(
            {
                "devices": count,
                "workers": run.workers,
                "hours": run.total / 3600,
                "hours_by_stage": {stage: seconds / 3600 for stage, seconds in run.seconds.items()},
                "bytes": run.bytes,
                "speedup": speedup,
                "efficiency": speedup * devices[0] / count,
                "busy": run.work / (run.total * run.workers),
            }
        )
    return rows


def stops_at(rows: Sequence[dict[str, Any]]) -> int:
    """The size of the cluster at which a larger one is no longer 1.25 times as fast for twice the devices."""
    for row, larger in itertools.pairwise(rows):
        doublings = math.log2(larger["devices"] / row["devices"])
        if (row["hours"] / larger["hours"]) ** (1 / doublings) < 1.25:
            return row["devices"]
    return rows[-1]["devices"]
