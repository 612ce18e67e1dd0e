"""What every benchmark shares: figures with their targets, fair timing of two sides, the JSON that is kept.

A benchmark measures both of its sides in one process, in turns, and takes the median of the repeats, because a
machine's speed drifts by more than most differences. Figures are ratios; seconds stand beside them for the record.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.kept import matches
from freemoe.core.environment import describe_environment
from freemoe.core.errors import FreeMoEError
from freemoe.core.files import cache_folder, write_atomic
from freemoe.core.registry import Registry
from freemoe.core.run.places import ExecutorSpec
from freemoe.core.run.progress import Progress, QuietProgress


@dataclass(frozen=True)
class Figure:
    """One measured number and what it is held against."""

    name: str  # What it is, in a few words
    value: float  # The number; NaN where it could not be measured (``note`` says why), which misses every target
    target: float | None = None  # What it is held against; None for a number that stands beside a target
    # Whether the target is the least (``higher``) or the most (``lower``) that meets it
    better: Literal["higher", "lower"] = "higher"
    unit: str = "x"  # Printed behind the number, with its own space where one belongs: ``x``, `` %``, `` ms``
    digits: int = 2  # Decimals printed
    note: str = ""  # What else belongs beside the number: an interval, the rival's setting

    def verdict(self, quick: bool) -> str:
        """``met`` or ``missed``; ``not judged`` without a target, or in a quick run, which measures too little."""
        if self.target is None or quick:
            return "not judged"
        good = self.value >= self.target if self.better == "higher" else self.value <= self.target
        return "met" if good else "missed"

    def line(self, quick: bool = False) -> str:
        """``name: value (target ...) met|missed``."""
        shown = "not measured" if math.isnan(self.value) else f"{self.value:.{self.digits}f}{self.unit}"
        text = f"{self.name}: {shown}"
        if self.target is not None:
            text += f" (target {'>=' if self.better == 'higher' else '<='} {self.target:g}{self.unit})"
            text += f" {self.verdict(quick)}"
        return text + (f"; {self.note}" if self.note else "")


@dataclass(frozen=True)
class Settings:
    """How a benchmark shall run."""

    quick: bool = False  # Small sizes and one repeat: it shows that the benchmark runs, not the figure
    seed: int = 0  # Of every random shape and draw
    repeats: int = 5  # How often each side is timed
    # Folder with the real benchmark files and the real model, for the figures that need them
    data_root: Path | None = None
    # A base to measure on, where a benchmark can take one, and the real LLM of `real`: folder, file or hub id
    model: str | None = None
    cells: Path | None = None  # Where benchmarks that go cell by cell keep what is finished
    only: str | None = None  # Pattern of the names of the parts that are measured: cells, masks of `tomoe-speed`
    minutes: float | None = None  # After so many no further cell is begun
    # Where cells of the benchmarks in `SIDE_BY_SIDE` are measured
    place: ExecutorSpec = field(default_factory=ExecutorSpec)
    device: str = "cpu"  # Where the models of the benchmarks in `ON_DEVICES` stand
    cache: Path = field(default_factory=lambda: cache_folder())  # Where bases that take long to train are kept
    progress: Progress = field(default_factory=QuietProgress)  # Where to report

    @property
    def rounds(self) -> int:
        """Repeats of a timing: one in a quick run."""
        return 1 if self.quick else self.repeats

    def wants(self, part: str) -> bool:
        """Whether a part of a benchmark is asked for."""
        return matches(part, self.only)


@dataclass(frozen=True)
class Outcome:
    """What a benchmark found: its figures, and anything else worth keeping."""

    figures: tuple[Figure, ...]
    details: dict[str, Any] = field(default_factory=dict)


BENCHES: Registry[str] = Registry("benchmark")
_ROWS = yaml.safe_load(Path(__file__).with_name("benches.yaml").read_text(encoding="utf-8"))
for _name, _row in _ROWS.items():
    BENCHES.add(_name, _row["module"], _row["about"])

HARDENING = ("fuzz", "kill", "sandbox", "soak")
"""What were benchmarks and are tests: those in ``tests/hardening/NAME``, which leave records as benchmarks do."""

ON_DEVICES = tuple(name for name, row in _ROWS.items() if row.get("devices"))
"""Benchmarks that ``--device`` moves; the others run where they always do."""

SIDE_BY_SIDE = tuple(name for name, row in _ROWS.items() if row.get("cells"))
"""Benchmarks whose cells ``--on`` lets workers measure."""


def one_clock(threads: int) -> Callable[[], float]:
    """The clock for so many threads: of one the processor's time, which others on the machine do not lengthen."""
    return time.process_time if threads == 1 else time.perf_counter


def in_turns(
    sides: dict[str, Callable[[], Any]],
    repeats: int,
    warm: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every round by side, one after the other in every round, the first changing; ``warm``: once before, unmeasured."""
    from benchmarks.devices import wait
    from freemoe.evals import speed

    def timed(side: Callable[[], Any]) -> float:
        wait()
        began = clock()
        side()
        wait()
        return clock() - began

    return speed.in_turns({name: functools.partial(timed, side) for name, side in sides.items()}, repeats, warm)


def ratio(seconds: dict[str, list[float]], over: str, under: str) -> float:
    """Median over rounds of ``over``'s time divided by ``under``'s in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))


def in_own_process(module: str, asked: Sequence[Any]) -> Any:
    """What ``weigh(*asked)`` of a module returns in a process of its own; all of it plain data.

    Raises:
        FreeMoEError: The process failed; with the end of what it said.
    """
    code = (
        "import importlib, json, sys; from freemoe.core.memory import keep_memory_low; keep_memory_low(); "
        "print(json.dumps(importlib.import_module(sys.argv[1]).weigh(*json.loads(sys.argv[2]))))"
    )
    command = [sys.executable, "-c", code, module, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FreeMoEError(f"The process that weighs {asked[0]!r} failed: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])


def result_of(folder: Path) -> dict[str, Any]:
    """What a command of the package left in its folder."""
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def not_measured(
    name: str, target: float | None, unit: str, note: str, better: Literal["higher", "lower"] = "higher"
) -> Figure:
    """A figure whose note says why there is no number."""
    return Figure(name, math.nan, target, better, unit, note=note)


def run_bench(name: str, settings: Settings) -> dict[str, Any]:
    """Run one benchmark; returns what is kept as JSON: figures, verdicts, machine, versions, seconds.

    Raises:
        UnknownNameError: When there is no such benchmark.
    """
    module = importlib.import_module(BENCHES.get(name))
    began = time.perf_counter()
    outcome: Outcome = module.run(settings)
    seconds = time.perf_counter() - began
    return record(name, BENCHES.about(name), outcome, seconds, settings.quick, settings.seed, settings.device)


def record(
    name: str, about: str, outcome: Outcome, seconds: float, quick: bool = False, seed: int = 0, device: str = "cpu"
) -> dict[str, Any]:
    """What is kept of an outcome as JSON, which knows no NaN."""
    from benchmarks.devices import about as about_device

    figures = [
        {
            **asdict(f),
            "value": None if math.isnan(f.value) else f.value,
            "verdict": f.verdict(quick),
            "line": f.line(quick),
        }
        for f in outcome.figures
    ]
    return {
        "bench": name,
        "about": about,
        "quick": quick,
        "seed": seed,
        "seconds": round(seconds, 1),
        "figures": figures,
        "details": outcome.details,
        "environment": describe_environment() | ({} if device == "cpu" else {"device": about_device(device)}),
    }


def missed(results: Sequence[dict[str, Any]]) -> int:
    """How many figures of several benchmarks miss their target."""
    return sum(f["verdict"] == "missed" for r in results for f in r["figures"])


def listing(name: str, settings: Settings) -> list[dict[str, Any]]:
    """A benchmark's cells in order: name, whether it is done, and the seconds that it took, or about will; none for most."""
    module = importlib.import_module(BENCHES.get(name))
    return module.listing(settings) if hasattr(module, "listing") else []


def write_record(found: dict[str, Any], folder: Path) -> Path:
    """Write ``NAME.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found['bench']}.json"
    write_atomic(path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def save_result(result: dict[str, Any], folder: Path) -> Path:
    """Write ``NAME.json``, and the table and the picture of a benchmark whose module can ``draw`` them."""
    path = write_record(result, folder)
    module = importlib.import_module(BENCHES.get(result["bench"]))
    if hasattr(module, "draw"):
        module.draw(result["details"], folder)
    return path
