"""A run in full: how large, from which seed, and where its figures are kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.harness import Outcome, record, write_record

SHARE = float(os.environ.get("FREEMOE_HARDENING", "1"))
"""Of the cases, kills and minutes of a full run."""

SEED = int(os.environ.get("FREEMOE_HARDENING_SEED", "0"))
OUT = os.environ.get("FREEMOE_HARDENING_OUT")


def keep(name: str, about: str, outcome: Outcome, began: float) -> list[str]:
    """Write ``OUT/NAME.json``, where that is asked for; the figures that miss their targets, in words."""
    found = record(name, about, outcome, time.perf_counter() - began, quick=SHARE < 1, seed=SEED)
    if OUT:
        write_record(found, Path(OUT))
    return [figure.line() for figure in outcome.figures if figure.verdict(quick=False) == "missed"]
