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
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Input:
    """A number that the simulation is told, and where it is from."""

    value: float
    unit: str
    source: str


PAPER: dict[str, Input] = {
    "parameters": Input(70.6e9, "", "Llama 3.1 70B, its model card"),
    "layers": Input(80, "", "its config.json"),
    "hidden": Input(8192, "", "its config.json"),
    "width": Input(28672, "", "its config.json (intermediate_size)"),
    "weight_bytes": Input(2, "bytes", "bfloat16"),
    "domains": Input(64, "", "the question that is asked"),
    "reference_documents": Input(1000, "per domain", "assumed; ten times what a guard needs at least"),
    "reported_documents": Input(1000, "per domain", "assumed"),
    "tokens": Input(512, "per document", "assumed"),
    "off_share": Input(0.01, "of the weights", "the default budget of signed purification"),
    "place_bytes": Input(2, "bytes per weight off", "how masks of single weights are written: 16-bit places in blocks"),
    "norm_sets": Input(1, "", "one norm (p = 2) of every input of every linear, for every subdomain"),
    "device_flops": Input(989e12, "per second", "NVIDIA H100 SXM, dense bfloat16, its data sheet"),
    "utilisation": Input(0.35, "", "assumed, for forward and backward passes of batches of whole documents"),
    "devices_per_worker": Input(
        4, "", "128.5 GiB of weights and 45.6 GiB above them (docs/hardware.md) fill 3 devices of 80 GB; taken as 4"
    ),
    "storage": Input(20e9, "bytes/s", "assumed: shared storage that bases are read from, for all workers together"),
    "storage_of_one": Input(5e9, "bytes/s", "assumed: the same, for one worker"),
    "link": Input(12.5e9, "bytes/s", "100 Gbit/s: the first process's machine, each way"),
    "disk": Input(2e9, "bytes/s", "assumed: the first process's disk, which keeps what is finished"),
}
"""What is not measured here."""


@dataclass(frozen=True)
class Measured:
    """What is measured here and scaled.

    Attributes:
        passes: By stage: its time, in forward passes over the documents that it is about.
        unit_seconds: What a unit costs beside its work.
        start_seconds: From asking for a worker until it takes its first unit, without loading the base.
    """

    passes: dict[str, float]
    unit_seconds: float
    start_seconds: float


@dataclass(frozen=True)
class Part:
    """A unit of a stage.

    Attributes:
        seconds: Of work, on one worker.
        common: Bytes that every unit of the build reads, fetched once per worker.
        down: Bytes that it fetches besides.
        up: Bytes that it sends back.
    """

    seconds: float
    common: float
    down: float
    up: float


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
    """What a simulated build came to.

    Attributes:
        workers: That took part.
        seconds: In all, and of every stage.
        work: Seconds in which workers worked.
        bytes: Moved, by what: bases, down from the first process, back to it.
    """

    workers: int
    seconds: dict[str, float] = field(default_factory=dict)
    work: float = 0.0
    bytes: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(self.seconds.values())


def stages(measured: Measured, subdomains: int, seed: int = 0) -> dict[str, list[Part]]:
    """The units of a build by stage; the first stage is one unit that the first process does alone.

    Args:
        measured: What stages cost.
        subdomains: Of every domain.
        seed: Of the subdomains' sizes, which spread as clusters do.
    """
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
    """Do the stages one after the other, each unit when a worker is free; a stage ends with its last unit.

    Args:
        parts: Of `stages`.
        measured: What starting and handing out cost.
        devices: Of the cluster.
    """
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


def stops_at(rows: Sequence[dict[str, Any]], least: float = 1.25) -> int:
    """The size of the cluster at which a larger one is no longer so many times as fast for twice the devices."""
    for row, larger in itertools.pairwise(rows):
        doublings = math.log2(larger["devices"] / row["devices"])
        if (row["hours"] / larger["hours"]) ** (1 / doublings) < least:
            return row["devices"]
    return rows[-1]["devices"]


def told_inputs() -> dict[str, dict[str, Any]]:
    """The inputs as plain data."""
    return {name: asdict(found) for name, found in PAPER.items()}
