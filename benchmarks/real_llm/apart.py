"""Cells that workers measure side by side, here or on other machines: each in a fresh process, so that its memory is its own."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from benchmarks.real_llm.cells import Cell, Store
from benchmarks.real_llm.work import Job
from freemoe.core.errors import FreeMoEError
from freemoe.core.files import write_atomic
from freemoe.core.run.pool import WorkerPool
from freemoe.core.run.progress import Progress
from freemoe.core.run.units import Unit

_CODE = "from benchmarks.real_llm.apart import work_alone; work_alone()"


class Plan(Protocol):
    """What is read of a benchmark that goes cell by cell (`running.Bench`)."""

    store: Store
    finished: dict[str, dict[str, Any]]
    failed: dict[str, str]
    function: ClassVar[str]

    def due(self, cell: Cell) -> dict[str, Any] | None:
        """What decides a cell's record, if it is missing and can be measured now."""
        ...

    def job(self, cell: Cell) -> Job:
        """A cell with all that its process needs."""
        ...


@dataclass(frozen=True)
class _Carried:
    blob: bytes

    def get(self) -> bytes:
        return self.blob


def run_side_by_side(plan: Plan, cells: Sequence[Cell], end: float, progress: Progress, pool: WorkerPool) -> None:
    """Measure what is missing of some cells; one that stands on others when those are there.

    Args:
        plan: The benchmark.
        cells: Those that are asked for.
        end: When no further cell is begun, as `time.monotonic` says it.
        progress: Where to report.
        pool: The workers.
    """
    share = getattr(pool, "share", _Carried)
    with progress.stage("cells", len(cells)) as advance:
        advance(sum(cell.name in plan.finished for cell in cells))
        while time.monotonic() < end:
            due = {
                c.name: (c, known) for c in cells if c.name not in plan.failed and (known := plan.due(c)) is not None
            }
            # With an end each worker is given one at a time, without one all of them.
            batch = list(due) if end == float("inf") else list(due)[: pool.count]
            if not batch:
                return
            units = [_unit(plan, due[name][0], share) for name in batch]
            for unit, (good, found, tensors, seconds) in pool.run(units):
                cell, known = due[unit.name]
                advance(1)
                if not good:
                    plan.failed[cell.name] = found
                    progress.say(f"{cell.name}: failed ({found})")
                    continue
                if tensors is not None:
                    plan.store.folder.mkdir(parents=True, exist_ok=True)
                    write_atomic(plan.store.tensors(cell), tensors)
                plan.finished[cell.name] = plan.store.save(cell, known, {**found, "wall_seconds": seconds})
                progress.say(f"{cell.name}: {seconds:.0f} s")


def _unit(plan: Plan, cell: Cell, share: Any) -> Unit:
    job = plan.job(cell)
    needs = [share(Path(path).read_bytes()) if Path(path).exists() else None for _, path in job.needs]
    return Unit(cell.name, f"{__name__}:{measure.__name__}", {"job": job, "function": plan.function, "needs": needs})


def measure(job: Job, function: str, needs: Sequence[Any]) -> tuple[bool, Any, bytes | None, float]:
    """Measure a cell in a fresh process of this machine.

    Args:
        job: The cell; its paths of tensors are those of another machine.
        function: What measures it, as ``package.module:function``.
        needs: The tensors of the cells that it stands on.

    Returns:
        Whether it went well, the record or what went wrong, the tensors that it kept, seconds. One cell's trouble must not cost the
        cells behind it, so that nothing is raised.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, parcel in enumerate(needs):
            if parcel is not None:
                (folder / f"{number}.safetensors").write_bytes(parcel.get())
        below = tuple((cell, str(folder / f"{n}.safetensors")) for n, (cell, _) in enumerate(job.needs))
        own = replace(job, tensors=str(folder / "found.safetensors"), needs=below)
        asked = pickle.dumps((function, own, str(folder / "answer")))
        done = subprocess.run([sys.executable, "-c", _CODE], input=asked, capture_output=True, check=False)
        answer = folder / "answer"
        if not answer.exists():
            said = done.stderr.decode(errors="replace").strip()[-300:]
            return False, f"its process ended with {done.returncode}: {said}", None, 0.0
        good, found = pickle.loads(answer.read_bytes())
        kept = Path(own.tensors)
        return good, found, kept.read_bytes() if kept.exists() else None, time.perf_counter() - began


def work_alone() -> None:
    """What the fresh process does."""
    function, job, answer = pickle.load(sys.stdin.buffer)
    module, _, name = function.partition(":")
    try:
        told: tuple[bool, Any] = True, getattr(importlib.import_module(module), name)(job)
    except Exception as error:
        kind = "" if isinstance(error, FreeMoEError) else f"{type(error).__name__}: "
        told = False, f"{kind}{error}"
    Path(answer).write_bytes(pickle.dumps(told))
