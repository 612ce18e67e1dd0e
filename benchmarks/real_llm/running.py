"""`python -m benchmarks real`: run the cells that are missing, and make figures and tables of all that are there."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.harness import Outcome, Settings
from benchmarks.kept import matches
from benchmarks.real_llm.apart import Carried
from benchmarks.real_llm.cells import Cell, Store
from benchmarks.real_llm.data import MATERIALS, TASKS
from benchmarks.real_llm.figures.mixtures import mixture_tables
from benchmarks.real_llm.figures.tables import markdown, tables_of
from benchmarks.real_llm.figures.text_and_tasks import figures_of
from benchmarks.real_llm.plan import cells, estimates, needs
from benchmarks.real_llm.protocol import (
    Job,
    Protocol,
    faster_format,
    files_digest,
    identity,
    model_digest,
    quick_protocol,
)
from freemoe.core.errors import DataError, LockedError
from freemoe.core.files import write_atomic
from freemoe.core.run.lock import output_lock
from freemoe.core.run.places import ExecutorSpec
from freemoe.core.run.pool import WorkerPool
from freemoe.core.run.processes import end_with_parent
from freemoe.core.run.progress import Progress
from freemoe.core.run.units import Unit
from freemoe.distributed.executors import make_pool


@dataclass(eq=False)
class Bench:
    """The plan of one model on one data folder, and what of it is done."""

    model: str  # The base: folder, file or name
    root: Path  # The data folder
    store: Store
    protocol: Protocol
    wanted: list[Cell]  # Every cell, in order
    function: ClassVar[str] = "benchmarks.real_llm.work:measure_cell"  # What measures a cell
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)  # Records by their cells' names
    failed: dict[str, str] = field(default_factory=dict)  # What went wrong in this run, by the cell's name
    _lost: set[str] = field(default_factory=set)  # Finished cells whose tensors an open one needs, and which are gone
    _digests: dict[str, str] = field(default_factory=dict)

    def look(self) -> None:
        """Read every record that still counts."""
        for cell in self.wanted:
            # Files that are gone: the cell cannot be told stale, nor run again; `run_missing` says which.
            with contextlib.suppress(DataError):
                record = self._record(cell)
                if record is not None:
                    self.finished[cell.name] = record

    def _record(self, cell: Cell) -> dict[str, Any] | None:
        if not self.store.path(cell).exists():
            return None
        known = self.identity(cell)
        return self.store.load(cell, known) if known is not None else None

    def base(self, cell: Cell) -> str:
        """The model that a cell takes: the benchmark's, or another one below the data folder or by name."""
        inside = self.root / cell.base
        return self.model if not cell.base else str(inside) if inside.exists() else cell.base

    def terms(self, cell: Cell) -> Protocol:
        """The protocol, in fp32 for the tiny bases: casting their weights takes longer than it saves."""
        return replace(self.protocol, train="float32", score="float32") if cell.base else self.protocol

    def identity(self, cell: Cell) -> dict[str, Any] | None:
        """What decides a cell's record; None while a cell that it stands on is missing."""
        below = needs(cell, self.finished, self.wanted)
        if below is None:
            return None
        known = {c.name: self.finished[c.name]["identity"] for c in below}
        base = self.base(cell)
        model = self.digest(f"model|{base}", lambda: model_digest(base))
        return identity(cell, self.terms(cell), model, self._data(cell), known)

    def digest(self, key: str, work: Callable[[], str]) -> str:
        """A digest that is made once."""
        if key not in self._digests:
            self._digests[key] = work()
        return self._digests[key]

    def _data(self, cell: Cell) -> str:
        if cell.family == "null":
            names: list[str] = ["arc-easy"]
        elif cell.family == "route":
            names = [t.name for t in TASKS]
        elif cell.family == "cross":
            names = [m for m in MATERIALS if m != "tinystories"]
        else:
            names = [n for n in (cell.material, cell.other) if n]
        return self.digest(
            "data|" + ",".join(names),
            lambda: ",".join(files_digest(self.root, MATERIALS[n].files) for n in names),
        )

    def job(self, cell: Cell) -> Job:
        """A cell with all that its process needs."""
        below = needs(cell, self.finished, self.wanted) or []
        paths = tuple((c, str(self.store.tensors(c))) for c in below)
        return Job(cell, self.terms(cell), self.base(cell), str(self.root), str(self.store.tensors(cell)), paths)

    def due(self, cell: Cell) -> dict[str, Any] | None:
        """What decides a cell's record, if it or what others need of it is missing, and it can be measured now."""
        record = self._record(cell)
        if record is not None:
            self.finished[cell.name] = record
        done = cell.name in self.finished and cell.name not in self._lost
        waits = any(below.name in self._lost for below in needs(cell, self.finished, self.wanted) or [])
        return None if done or waits else self.identity(cell)

    def run_missing(
        self, only: str | None, minutes: float | None, progress: Progress, place: ExecutorSpec | None = None
    ) -> None:
        """Run, in order, the cells that match ``only`` and are not there yet, none begun after so many minutes."""
        end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
        open_ = [c for c in self.wanted if matches(c.name, only) and c.name not in self.finished]
        for cell in open_:
            # Records are kept without the tensors of their cells: what an open cell stands on is measured again.
            for below in needs(cell, self.finished, self.wanted) or []:
                if below not in open_ and not self.store.tensors(below).exists():
                    self._lost.add(below.name)
                    open_.append(below)
        chosen = [c for c in self.wanted if matches(c.name, only) or c.name in self._lost]
        if place is not None and place.is_parallel:
            read = [path for path in (self.model, str(self.root)) if path]
            with make_pool(place, threads=torch.get_num_threads(), needs=read) as workers:
                self._run_side_by_side(chosen, end, progress, workers)
            return
        with progress.stage("cells", len(chosen)) as advance:
            for cell in chosen:
                if time.monotonic() < end:
                    self._try(cell, progress)
                advance(1)

    def _run_side_by_side(self, cells: Sequence[Cell], end: float, progress: Progress, pool: WorkerPool) -> None:
        """Measure what is missing of some cells by workers; one that stands on others when those are there."""
        share = getattr(pool, "share", Carried)
        with progress.stage("cells", len(cells)) as advance:
            advance(sum(cell.name in self.finished for cell in cells))
            while time.monotonic() < end:
                known = {c.name: (c, self.due(c)) for c in cells if c.name not in self.failed}
                due = {name: (cell, decided) for name, (cell, decided) in known.items() if decided is not None}
                # With an end each worker is given one at a time, without one all of them.
                batch = list(due) if end == float("inf") else list(due)[: pool.count]
                if not batch:
                    return
                for unit, (good, found, tensors, seconds) in pool.run([self._unit(due[n][0], share) for n in batch]):
                    cell, decided = due[unit.name]
                    advance(1)
                    if not good:
                        self.failed[cell.name] = found
                        progress.say(f"{cell.name}: failed ({found})")
                        continue
                    if tensors is not None:
                        self.store.folder.mkdir(parents=True, exist_ok=True)
                        write_atomic(self.store.tensors(cell), tensors)
                    self._keep_record(cell, decided, {**found, "wall_seconds": seconds})
                    progress.say(f"{cell.name}: {seconds:.0f} s")

    def _keep_record(self, cell: Cell, identity: dict[str, Any], record: dict[str, Any]) -> None:
        self.finished[cell.name] = self.store.save(cell, identity, record)
        self._lost.discard(cell.name)

    def _unit(self, cell: Cell, share: Callable[[bytes], Any]) -> Unit:
        job = self.job(cell)
        needs = [share(Path(path).read_bytes()) if Path(path).exists() else None for _, path in job.needs]
        return Unit(
            cell.name, "benchmarks.real_llm.apart:measure", {"job": job, "function": self.function, "needs": needs}
        )

    def _try(self, cell: Cell, progress: Progress) -> None:
        """Run a cell unless it is there by now, perhaps from another process, or a cell that it stands on is missing."""
        began = time.perf_counter()
        try:
            known = self.due(cell)
            if known is None:
                return
            with output_lock(self.store.path(cell)):
                self.store.folder.mkdir(parents=True, exist_ok=True)
                job, started = self.job(cell), time.perf_counter()
                record = in_own_process(job, pkgutil.resolve_name(self.function))
                record["wall_seconds"] = time.perf_counter() - started
                self._keep_record(cell, known, record)
        except LockedError as error:
            progress.say(f"{cell.name}: left to another run ({error})")
            return
        # One cell's trouble (no memory, a killed process, a NaN, a fault of another package's method) must not cost the
        # cells behind it.
        except Exception as error:
            self.failed[cell.name] = f"{type(error).__name__}: {error}"
            progress.say(f"{cell.name}: failed ({self.failed[cell.name]})")
            return
        progress.say(f"{cell.name}: {time.perf_counter() - began:.0f} s")


def in_own_process(job: Job, work: Callable[[Job], dict[str, Any]]) -> dict[str, Any]:
    """Run a cell in a fresh process, so that its time and memory are its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        return pool.submit(work, job).result()


def bench_of(
    settings: Settings, name: str = "real", plan: Sequence[Cell] | None = None, protocol: Protocol | None = None
) -> Bench:
    """A plan (that of `real`) on its terms, with every record that is there.

    Raises:
        DataError: Without a model or a data folder.
    """
    if settings.model is None or settings.data_root is None:
        absent = "a model: --model PATH" if settings.model is None else "the benchmarks' files: --data-root FOLDER"
        raise DataError(f"`python -m benchmarks {name}` needs {absent}.")
    folder = settings.cells or settings.cache / f"{name}-cells"
    protocol = quick_protocol() if settings.quick else protocol or Protocol()
    if not settings.quick:
        format_name = faster_format(folder, settings.model)
        protocol = replace(protocol, train=format_name, score=format_name)
    planned = cells(settings.quick) if plan is None else plan
    wanted = [replace(c, seed=c.seed + settings.seed) for c in planned]
    bench = Bench(settings.model, settings.data_root, Store(folder), protocol, wanted)
    bench.look()
    return bench


def listing(settings: Settings) -> list[dict[str, Any]]:
    """Every cell in order: its name, whether it is done, and the seconds that it took, or about will."""
    bench = bench_of(settings)
    return listed(bench, estimates(bench.wanted, bench.protocol, bench.finished), settings.only)


def listed(bench: Bench, seconds: Mapping[str, float], only: str | None) -> list[dict[str, Any]]:
    """A plan's cells that are asked for: name, whether it is done, and the seconds that it took, or by ``seconds`` will."""
    rows = []
    for cell in bench.wanted:
        if matches(cell.name, only):
            done = cell.name in bench.finished
            took = bench.finished[cell.name]["wall_seconds"] if done else seconds[cell.name]
            rows.append({"name": cell.name, "done": done, "seconds": took})
    return rows


def run(settings: Settings) -> Outcome:
    """Run what is missing, then make figures and tables of all that is there."""
    bench = bench_of(settings)
    bench.run_missing(settings.only, settings.minutes, settings.progress, settings.place)
    spent = sum(r["wall_seconds"] for r in bench.finished.values())
    details = {
        "model": Path(bench.model).name,
        "cells": {"done": len(bench.finished), "planned": len(bench.wanted), "hours": round(spent / 3600, 2)},
        "failed": bench.failed,
        "protocol": asdict(bench.protocol),
        **tables_of(bench.finished),
    }
    mixtures = mixture_tables(bench.finished)
    if mixtures:
        details["mixtures"] = mixtures
    figures = figures_of(bench.finished)
    if settings.only is not None:
        # Whoever asks for some cells need not read about all others.
        figures = [figure for figure in figures if not math.isnan(figure.value)]
    return Outcome(tuple(figures), details)


def draw(details: dict[str, Any], folder: Path) -> None:
    """Write ``real.md``."""
    write_atomic(folder / "real.md", markdown(details).encode())
