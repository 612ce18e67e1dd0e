"""What was measured on this machine, and how: the file that keeps it, and timing in turns.

It is kept in ``$FREEMOE_CACHE/crossovers.json`` (else ``~/.cache/freemoe``), by processor, threads and what else a caller names.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def cache_file() -> Path:
    """Where measurements are kept."""
    # As `core.files.cache_folder`, which a converted model that is loaded without freemoe does not have.
    own = os.environ.get("FREEMOE_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "freemoe"
    return folder.expanduser() / "crossovers.json"


def machine_key(what: str) -> str:
    """The name under which something that was measured here, with so many threads, is kept."""
    return f"{platform.machine()} {_processor()} {torch.get_num_threads()} threads {what}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _all() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def known(key: str) -> Any:
    """What is kept under a name, whatever wrote it; None where there is nothing."""
    return _all().get(key)


def keep(key: str, found: Mapping[str, Any]) -> None:
    """Write the file anew; where that cannot be done, the answer is measured again next time."""
    path = cache_file()
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(_all() | {key: dict(found)}, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()


def fastest(ways: tuple[Callable[[], Any], ...], repeats: int) -> list[float]:
    """Seconds of each way, in turns; of one thread the processor's, which others on the machine do not lengthen."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = [float("inf")] * len(ways)
    for way in ways:
        way()
    for _ in range(repeats):
        for number, way in enumerate(ways):
            began = clock()
            way()
            seconds[number] = min(seconds[number], clock() - began)
    return seconds
