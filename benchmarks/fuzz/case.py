"""A case: plain data that says what is opened; and how it may end."""

from __future__ import annotations

import importlib
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freemoe.core.errors import DataError, FreeMoEError
from freemoe.core.files import digest, write_atomic
from freemoe.core.registry import Registry

if TYPE_CHECKING:
    from benchmarks.fuzz.material import Material

PATIENCE = 10.0
"""Seconds that a case may take."""

CROWDED = 5
"""Times as long it may take while it hardly gets a processor, as one that sleeps does."""

KINDS: Registry[str] = Registry("kind of fuzzing")
"""Name -> module with ``strategy(material)`` (needs hypothesis) and ``attempt(what, material, folder)``."""
_HERE = "benchmarks.fuzz.kinds"
KINDS.add("recipes", f"{_HERE}.recipes", "recipes as YAML")
KINDS.add("tasks", f"{_HERE}.tasks", "task files: JSONL, JSON, CSV, TSV, text")
KINDS.add("artefacts", f"{_HERE}.artefacts", "artefacts of build and trim, their checksums made right again")
KINDS.add("bases", f"{_HERE}.bases", "folders of base models: config, weights, tokenizer")
KINDS.add("results", f"{_HERE}.results", "result files, and the tables and pages made of them")
KINDS.add("requests", f"{_HERE}.requests", "bodies of HTTP requests to the server")
KINDS.add("flags", f"{_HERE}.flags", "command lines of build, eval, convert and trim")

Ending = Literal["refused", "accepted", "traceback", "hang", "crash", "wrong"]
GOOD: tuple[Ending, ...] = ("refused", "accepted")


class WrongError(Exception):
    """Something was accepted and is not what the changed input says."""


class Refused(Exception):
    """Not accepted, in words of ours."""


class _TooLong(BaseException):
    """Rung by the alarm; no handler of ``Exception`` may swallow it."""


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        kind: A name of `KINDS`.
        what: What is opened, as its kind reads it: plain data.
        seed: Of the draw that it came from; None of one that was written by hand.
        about: In words, where somebody wrote them.
    """

    kind: str
    what: Any
    seed: int | None = None
    about: str = ""

    @property
    def name(self) -> str:
        """``KIND-HASH``, the same for the same case."""
        return f"{self.kind}-{digest(repr(self.what))}"


@dataclass(frozen=True)
class Verdict:
    """How a case ended.

    Attributes:
        ending: ``refused`` by an error of ours and ``accepted`` are good; ``wrong`` was accepted and is not what it says.
        said: The error's first lines, or the end of the traceback.
        seconds: It took.
    """

    ending: Ending
    said: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether it is as it should be."""
        return self.ending in GOOD


def write_case(case: Case, folder: Path) -> Path:
    """Keep a case as a file that `read_case` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.name}.json"
    write_atomic(path, (json.dumps(vars(case), indent=1) + "\n").encode())
    return path


def read_case(path: Path) -> Case:
    """A case from a file.

    Raises:
        DataError: It is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        case = Case(found["kind"], found["what"], found.get("seed"), found.get("about", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no case of python -m benchmarks fuzz ({error!r}).") from None
    KINDS.get(case.kind)
    return case


def warm(kind: str, material: Material) -> None:
    """Load what the cases of a kind need, so that none of them is charged for it."""
    prepare = getattr(importlib.import_module(KINDS.get(kind)), "warm", None)
    if prepare is not None:
        prepare(material)


def judge(case: Case, material: Material, patience: float = PATIENCE) -> Verdict:
    """Open what a case says, in a folder of its own, with an alarm."""
    module = importlib.import_module(KINDS.get(case.kind))
    began = time.perf_counter()

    def verdict(ending: Ending, said: str = "") -> Verdict:
        return Verdict(ending, said[-1500:], round(time.perf_counter() - began, 3))

    with tempfile.TemporaryDirectory(prefix="freemoe-fuzz-") as name, _inside(Path(name)):
        try:
            with _alarm(patience):
                module.attempt(case.what, material, Path(name))
        except (FreeMoEError, Refused) as error:
            return verdict("refused", str(error)[:300])
        except WrongError as error:
            return verdict("wrong", str(error))
        except _TooLong:
            return verdict("hang", traceback.format_exc())
        except KeyboardInterrupt:
            raise
        except BaseException:  # a panic of Rust code is no Exception
            return verdict("traceback", traceback.format_exc())
        return verdict("accepted")


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Ring after so many seconds; what does not come back to Python is for the parent to end."""
    began, own = time.monotonic(), time.process_time()

    def ring(*_: Any) -> None:
        # On a crowded machine a case that had no processor did not hang.
        if time.process_time() - own < seconds / 2 and time.monotonic() - began < CROWDED * seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds / 2)
            return
        raise _TooLong

    if not hasattr(signal, "setitimer"):
        yield
        return
    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
