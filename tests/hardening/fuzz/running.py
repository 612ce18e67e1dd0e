"""Cases are drawn here and opened in a process of their own, which may hang or die."""

import faulthandler
import logging
import resource
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Outcome
from tests.hardening.full import count, none
from tests.hardening.fuzz.case import CROWDED, PATIENCE, SHARES, Case, Verdict, judge, module_of, warm
from tests.hardening.fuzz.drawing import draw
from tests.hardening.fuzz.material import Material
from tests.hardening.worker import Worker

CASES = 10_000
"""Of a full run, all kinds together."""
ROUND = 100
"""Cases that are drawn at once, under one seed."""
MEMORY = 8 << 30
"""Bytes of address space that a process may take, so that a case that asks for more ends as an error."""
_GRACE = 6.0
_KEPT = 200


def share_of(kind, total):
    return max(1, round(total * SHARES[kind] / 100))


def cases(material, kind, count, seed):
    """So many cases of a kind, of one seed; each once, fewer where there are no more."""
    strategy = module_of(kind).strategy(material)
    seen = set()
    for number in range(4 * count // ROUND + 4):
        own = seed * 1_000_003 + number
        for what in draw(strategy, min(ROUND, count), own):
            case = Case(kind, what, own)
            if len(seen) < count and case.name not in seen:
                seen.add(case.name)
                yield case
        if len(seen) >= count:
            break


class Opener:
    """Opens cases of one kind in a process of their own; another one is started where it hangs or dies."""

    def __init__(self, material, kind, patience=PATIENCE):
        self._arguments = str(material.folder), kind, patience
        self._seconds = CROWDED * patience + _GRACE
        self._worker: Worker | None = None

    def judge(self, case):
        """How a case ends; ``hang`` where nothing comes back, ``crash`` where the process dies."""
        self._worker = self._worker or Worker(__name__, *self._arguments)
        try:
            return Verdict(**self._worker.ask(vars(case), self._seconds))
        except TimeoutError:
            verdict = Verdict("hang", "nothing came back, and the process did not hear its alarm", self._seconds)
        except EOFError:
            verdict = Verdict("crash", f"the process ended with {self._worker.process.wait()}")
        self.close()
        return verdict

    def close(self):
        if self._worker:
            self._worker.close()
        self._worker = None


def start(folder, kind, patience):
    """What the process does with a case."""
    faulthandler.enable()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most), most))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    material = Material(Path(folder))
    warm(kind, material)
    return lambda case: asdict(judge(Case(**case), material, patience))


def outcome(found, wanted):
    """The figures of cases that were opened, of so many that were wanted, and those that did not end well."""
    endings = Counter(verdict.ending for _, verdict in found)
    kinds = Counter(case.kind for case, _ in found)
    told = ", ".join(f"{kind} {tried}" for kind, tried in kinds.items())
    answered = f"{endings['accepted']} accepted, {endings['refused']} refused"
    figures = (
        count("inputs tried", len(found), wanted, told),
        none("tracebacks", endings["traceback"] + endings["crash"], f"{endings['crash']} crashes"),
        none(f"hangs over {PATIENCE:g} s", endings["hang"]),
        none("wrong results accepted", endings["wrong"], answered),
    )
    slowest = sorted(found, key=lambda one: -one[1].seconds)[:5]
    details = {
        "by_kind": {kind: dict(Counter(v.ending for c, v in found if c.kind == kind)) for kind in kinds},
        "slowest": [{"case": case.name, "seconds": verdict.seconds} for case, verdict in slowest],
        "bad": [{"case": vars(case), **asdict(verdict)} for case, verdict in found if not verdict.good][:_KEPT],
    }
    return Outcome(figures, details)
