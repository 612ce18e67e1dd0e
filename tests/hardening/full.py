"""A run in full: how large, from which seed, and where its figures are kept."""

import os
import time
from pathlib import Path

from benchmarks.harness import Figure, record, write_record

SHARE = float(os.environ.get("FREEMOE_HARDENING", "1"))
"""Of the cases, kills and minutes of a full run."""

SEED = int(os.environ.get("FREEMOE_HARDENING_SEED", "0"))
OUT = os.environ.get("FREEMOE_HARDENING_OUT")


def count(name, value, least=None, note=""):
    """How many there are, and how few will do."""
    return Figure(name, value, least, "higher", "", 0, note)


def none(name, value, note=""):
    """How many there are of what there must not be."""
    return Figure(name, value, 0, "lower", "", 0, note)


def keep(name, about, outcome, began):
    """Write ``OUT/NAME.json``, where that is asked for; the figures that miss their targets, in words."""
    found = record(name, about, outcome, time.perf_counter() - began, quick=SHARE < 1, seed=SEED)
    if OUT:
        write_record(found, Path(OUT))
    # What another program on the machine can lengthen is kept, and no test fails by it.
    judged = [figure for figure in outcome.figures if figure.unit != " ms"]
    return [figure.line() for figure in judged if figure.verdict(quick=False) == "missed"]
