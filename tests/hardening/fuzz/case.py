"""A case: plain data that says what is opened; and how it may end."""

import importlib
import json
import signal
import tempfile
import time
import traceback
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from freemoe.core.errors import FreeMoEError
from freemoe.core.files import json_digest

PATIENCE = 10.0
"""Seconds that a case may take."""

CROWDED = 5
"""Times as long it may take while it hardly gets a processor, as one that sleeps does."""

SHARES = {"recipes": 27, "tasks": 27, "artefacts": 17, "requests": 10, "flags": 9, "results": 7, "bases": 3}
"""Kinds, each a module of `kinds`, and their per cent of the cases, about in the order of what a case costs."""

Ending = Literal["refused", "accepted", "traceback", "hang", "crash", "wrong"]


class WrongError(Exception):
    """Something was accepted and is not what the changed input says."""


class Refused(Exception):
    """Not accepted, in words of ours."""


class _TooLong(BaseException):
    """Rung by the alarm; no handler of ``Exception`` may swallow it."""


def require(holds, what):
    """Raise where something was accepted that must not be."""
    if not holds:
        raise WrongError(what)


@dataclass(frozen=True)
class Case:
    kind: str  # a module of `kinds`
    what: Any  # what is opened, as its kind reads it: plain data
    seed: int | None = None  # of the draw that it came from; None of one that was written by hand
    about: str = ""  # in words, where somebody wrote them

    @property
    def name(self):
        return f"{self.kind}-{json_digest(repr(self.what))}"


@dataclass(frozen=True)
class Verdict:
    """How a case ended: refused by an error of ours and accepted are good; wrong was accepted and is not what it says."""

    ending: Ending
    said: str = ""  # the error's first lines, or the end of the traceback
    seconds: float = 0.0

    @property
    def good(self):
        return self.ending in ("refused", "accepted")


def write_case(case, folder):
    """Keep a case as a file that `read_case` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.name}.json"
    path.write_text(json.dumps(vars(case), indent=1) + "\n", encoding="utf-8")
    return path


def read_case(path):
    return Case(**json.loads(path.read_text(encoding="utf-8")))


def module_of(kind):
    """What draws (``strategy(material)``) and opens (``attempt(what, material, folder)``) the cases of a kind."""
    return importlib.import_module(f"tests.hardening.fuzz.kinds.{kind}")


def warm(kind, material):
    """Load what the cases of a kind need, so that none of them is charged for it."""
    getattr(module_of(kind), "warm", lambda _: None)(material)


def judge(case, material, patience=PATIENCE):
    """Open what a case says, in a folder of its own, with an alarm."""
    module = module_of(case.kind)
    began = time.perf_counter()

    def verdict(ending, said=""):
        return Verdict(ending, said[-1500:], round(time.perf_counter() - began, 3))

    with tempfile.TemporaryDirectory(prefix="freemoe-fuzz-") as name, chdir(name):
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
def _alarm(seconds):
    """Ring after so many seconds; what does not come back to Python is for the parent to end."""
    began, own = time.monotonic(), time.process_time()

    def ring(*_):
        # On a crowded machine a case that had no processor did not hang.
        if time.process_time() - own < seconds / 2 and time.monotonic() - began < CROWDED * seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds / 2)
            return
        raise _TooLong

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
