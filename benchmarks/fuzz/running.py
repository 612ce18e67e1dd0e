"""`python -m benchmarks fuzz`: cases are drawn here and opened in a process of their own, which may hang or die."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.fuzz.case import CROWDED, KINDS, PATIENCE, Case, Verdict, read_case, write_case
from benchmarks.fuzz.material import Material, make_material
from benchmarks.harness import Figure, Outcome, Settings
from freemoe.core.errors import RecipeError, VersionError

CASES, QUICK = 10_000, 300
"""Of a whole run, and of a quick one."""

SHARES = {"recipes": 27, "tasks": 27, "artefacts": 17, "requests": 10, "flags": 9, "results": 7, "bases": 3}
"""Of the kinds, about in the order of what a case costs."""

ROUND = 100
"""Cases that are drawn at once, under one seed."""

_GRACE, _START = 6.0, 300.0
_KEPT = 200


def counts(total: int, kinds: list[str]) -> dict[str, int]:
    """Cases of every kind."""
    shares = {kind: SHARES.get(kind, 10) for kind in kinds}
    return {kind: -(-total * share // sum(shares.values())) for kind, share in shares.items()}


def cases(material: Material, wanted: dict[str, int], seed: int) -> Iterator[Case]:
    """The cases of a seed, kind by kind; each once.

    Raises:
        VersionError: hypothesis is not installed.
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise VersionError("python -m benchmarks fuzz draws its cases with hypothesis: pip install 'freemoe[dev]'.")
    from benchmarks.fuzz.drawing import draw

    for kind, count in wanted.items():
        strategy = importlib.import_module(KINDS.get(kind)).strategy(material)
        seen: set[str] = set()
        for number in range(4 * count // ROUND + 4):
            own = seed * 1_000_003 + number
            for what in draw(strategy, min(ROUND, count), own):
                case = Case(kind, what, own)
                if len(seen) < count and case.name not in seen:
                    seen.add(case.name)
                    yield case
            if len(seen) >= count:
                break


class Worker:
    """The process that opens cases; another one is started where it hangs or dies.

    Args:
        material: What cases are made of.
        patience: Seconds for a case, before the worker itself calls it a hang.
    """

    def __init__(self, material: Material, patience: float = PATIENCE) -> None:
        self.material, self.patience = material, patience
        self._process: subprocess.Popen[str] | None = None
        self._warmed: set[str] = set()
        self._lines: SimpleQueue[str | None] = SimpleQueue()

    def judge(self, case: Case) -> Verdict:
        """How a case ends; ``hang`` where nothing comes back, ``crash`` where the process dies."""
        first = self._process is None or case.kind not in self._warmed
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(vars(case)) + "\n")
            process.stdin.flush()
            # The first case of a kind waits for what it needs to be loaded.
            line = self._lines.get(timeout=CROWDED * self.patience + _GRACE + (_START if first else 0))
        except Empty:
            self.close()
            return Verdict("hang", "nothing came back, and the process did not hear its alarm", self.patience)
        except BrokenPipeError:
            line = None
        self._warmed.add(case.kind)
        if line is None:
            code = process.wait()
            self.close()
            return Verdict("crash", f"the process ended with {code}")
        return Verdict(**json.loads(line))

    def _start(self) -> subprocess.Popen[str]:
        kinds = {name: KINDS.get(name) for name in KINDS.names()}
        command = [sys.executable, "-m", "benchmarks.fuzz.worker", str(self.material.folder), str(self.patience)]
        process = subprocess.Popen(
            [*command, json.dumps(kinds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._process, self._lines = process, SimpleQueue()
        threading.Thread(target=_read, args=(process, self._lines), daemon=True).start()
        return process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process, self._warmed = None, set()


def _read(process: subprocess.Popen[str], lines: SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def run(settings: Settings) -> Outcome:
    """Draw cases and open them; or open those again that are named by ``only``.

    Raises:
        RecipeError: ``only`` is neither a kind nor a file or folder of cases.
    """
    with tempfile.TemporaryDirectory(prefix="freemoe-fuzz-") as name:
        material = make_material(Path(name))
        found = _run_all(_asked(settings, material), material, settings)
    by_ending: Counter[str] = Counter(verdict.ending for _, verdict in found)
    tried = len(found)
    kinds = Counter(case.kind for case, _ in found)
    again = _is_files(settings.only)
    target = None if again or settings.only else CASES
    figures = (
        Figure("inputs tried", tried, target, "higher", "", 0, ", ".join(f"{k} {n}" for k, n in kinds.items())),
        Figure(
            "tracebacks",
            by_ending["traceback"] + by_ending["crash"],
            0,
            "lower",
            "",
            0,
            f"{by_ending['crash']} crashes",
        ),
        Figure(f"hangs over {PATIENCE:g} s", by_ending["hang"], 0, "lower", "", 0),
        Figure(
            "wrong results accepted",
            by_ending["wrong"],
            0,
            "lower",
            "",
            0,
            f"{by_ending['accepted']} accepted, {by_ending['refused']} refused",
        ),
    )
    bad = [{"case": vars(case), **asdict(verdict)} for case, verdict in found if not verdict.good]
    slowest = sorted(found, key=lambda one: -one[1].seconds)[:5]
    details = {
        "by_kind": {kind: dict(Counter(v.ending for c, v in found if c.kind == kind)) for kind in kinds},
        "slowest": [{"case": case.name, "seconds": verdict.seconds} for case, verdict in slowest],
        "bad": bad[:_KEPT],
    }
    return Outcome(figures, details)


def _run_all(asked: Iterator[Case], material: Material, settings: Settings) -> list[tuple[Case, Verdict]]:
    worker, found = Worker(material), []
    bad: Counter[str] = Counter()
    try:
        for case in asked:
            verdict = worker.judge(case)
            found.append((case, verdict))
            if not verdict.good:
                bad[verdict.ending] += 1
            if len(found) % ROUND == 0:
                settings.progress.say(f"{len(found)} cases, now {case.kind}; {dict(bad) or 'all as they should be'}")
    finally:
        worker.close()
    return found


def _asked(settings: Settings, material: Material) -> Iterator[Case]:
    total = QUICK if settings.quick else CASES
    if settings.only is None:
        return cases(material, counts(total, KINDS.names()), settings.seed)
    if _is_files(settings.only):
        place = Path(settings.only)
        return map(read_case, sorted(place.glob("*.json")) if place.is_dir() else [place])
    kinds = [kind for kind in KINDS.names() if settings.wants(kind)]
    if not kinds:
        raise RecipeError(
            f"--only is {settings.only!r}; allowed: a kind ({', '.join(KINDS.names())}), the file of a case, or a folder of them."
        )
    return cases(material, {k: n for k, n in counts(total, KINDS.names()).items() if k in kinds}, settings.seed)


def _is_files(only: str | None) -> bool:
    return only is not None and Path(only).exists()


def draw(details: dict[str, Any], folder: Path) -> None:
    """Write every case that is not as it should be as a file that ``--only FILE`` opens again."""
    for bad in details["bad"]:
        case = Case(**bad["case"])
        write_case(
            Case(case.kind, case.what, case.seed, case.about or f"{bad['ending']}: {bad['said'][-400:]}"),
            folder / "fuzz-cases",
        )
