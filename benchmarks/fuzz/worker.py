"""A process that opens one case after the other: lines of JSON in, lines of JSON out. Whoever started it outlives it."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

MEMORY = 8 << 30
"""Bytes of address space that a worker may take, so that a case that asks for more ends as an error."""


def main(folder: str, patience: str, kinds: str) -> None:
    """Answer cases until the input ends.

    Args:
        folder: Of the material.
        patience: Seconds for a case.
        kinds: Names of kinds and their modules, as JSON.
    """
    # What libraries print must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()
    _bound_memory()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from benchmarks.fuzz.case import KINDS, Case, judge, warm
    from benchmarks.fuzz.material import Material

    for name, module in json.loads(kinds).items():
        if name not in KINDS:
            KINDS.add(name, module, "")
    material = Material(Path(folder))
    warmed: set[str] = set()
    for line in sys.stdin:
        case = Case(**json.loads(line))
        if case.kind not in warmed:
            warmed.add(case.kind)
            warm(case.kind, material)
        found = judge(case, material, float(patience))
        answers.write(json.dumps(asdict(found)) + "\n")
        answers.flush()


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most), most))


if __name__ == "__main__":
    main(*sys.argv[1:])
