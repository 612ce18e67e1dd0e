"""Cells that workers measure side by side, here or on other machines: each in a fresh process, so that its memory is its own."""

from __future__ import annotations

import pickle
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.real_llm.protocol import Job
from freemoe.core.errors import FreeMoEError

_CODE = "from benchmarks.real_llm.apart import work_alone; work_alone()"


@dataclass(frozen=True)
class Carried:
    """Bytes that travel with what is asked, where workers share none."""

    blob: bytes

    def get(self) -> bytes:
        """The bytes."""
        return self.blob


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
    try:
        told: tuple[bool, Any] = True, pkgutil.resolve_name(function)(job)
    except Exception as error:
        kind = "" if isinstance(error, FreeMoEError) else f"{type(error).__name__}: "
        told = False, f"{kind}{error}"
    Path(answer).write_bytes(pickle.dumps(told))
