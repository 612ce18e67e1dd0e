"""What all cells share: documents, steps, the rule of stopping, number formats; and what a cell's record depends on."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_llm.cells import Cell
from benchmarks.rivals.rival import Schedule
from freemoe.core.errors import DataError
from freemoe.core.files import write_atomic

FORMAT = 1
VERSIONS: dict[str, int] = {
    "greedy": 1,
    "learned": 4,
    "structured-switches": 3,
    "structured-free-switches": 3,
    "route": 2,
}
"""Raised by hand when a method, or what a family of cells does, is changed so that its old records no longer speak for it."""

# bf16 must be this much faster than fp32 before it is worth its rounding.
_WORTH_IT = 1.3
_TRIED = 1024


@dataclass(frozen=True)
class Protocol:
    """The terms on which all methods meet."""

    # Reference documents of a material: parted for gradients, stopping and the guard as a build does it
    reference: int = 600
    blocks: int = 200  # Reported blocks of a text
    questions: int = 500  # Reported questions of a task
    crossed: int = 100  # Reported documents of every other material that an expert is tried on
    given: int = 16  # Tokens at the start of a block of text that are context only
    step_questions: int = 32  # Questions of a training step; for text ``schedule.step_tokens`` counts
    # Steps and the rule of stopping
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=60, step_tokens=2048, every=10, patience=3))
    train: str = "float32"  # Number format that the model stands in while switches, neurons or LoRA are trained
    score: str = "float32"  # Number format of products in scoring, for all methods alike; weights are fp32
    batch_tokens: int = 2048  # Padded tokens of a batch


@dataclass(frozen=True)
class Job:
    """A cell with all that its process needs, files by their paths; ``needs``: the cells that it stands on, their tensors."""

    cell: Cell
    protocol: Protocol
    model: str
    root: str
    tensors: str
    needs: tuple[tuple[Cell, str], ...] = ()


def quick_protocol() -> Protocol:
    """A protocol that shows that everything runs, and judges nothing."""
    schedule = Schedule(steps=4, step_tokens=512, every=2, patience=1)
    return Protocol(40, 8, 12, 4, 16, 8, schedule)


_SUMS: dict[tuple[Path, int, int], str] = {}


def file_sum(path: Path) -> str:
    """SHA-256 of a file, read again only when its size or time changed."""
    stat = path.stat()
    key = path, stat.st_size, stat.st_mtime_ns
    if key not in _SUMS:
        with path.open("rb") as stream:
            _SUMS[key] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _SUMS[key]


def files_digest(root: Path, patterns: tuple[str, ...]) -> str:
    """Digest of every file below ``root`` that one of ``patterns`` names.

    Raises:
        DataError: When a pattern names no file.
    """
    total = hashlib.sha256()
    for pattern in patterns:
        found = sorted(root.glob(pattern))
        if not found:
            raise DataError(f"No {pattern!r} under the data folder {root.resolve()} (--data-root). Check the path.")
        for path in found:
            total.update(f"{path.relative_to(root)}:{file_sum(path)};".encode())
    return total.hexdigest()[:16]


def model_digest(model: str) -> str:
    """Digest of a model's files; for a hub id or a bundled name, the fingerprint of its loaded weights."""
    path = Path(model).expanduser()
    if path.is_file():
        return file_sum(path)[:16]
    if path.is_dir():
        kinds = (".safetensors", ".json", ".gguf", ".bin", ".model", ".txt")
        names = sorted(p for p in path.iterdir() if p.suffix in kinds)
        return hashlib.sha256("".join(f"{p.name}:{file_sum(p)};" for p in names).encode()).hexdigest()[:16]
    from freemoe.models.checkpoints.fingerprint import fingerprint_model
    from freemoe.models.checkpoints.loading import load_base

    return fingerprint_model(load_base(model, dtype="float32", device="cpu")[0])[:16]


def identity(cell: Cell, protocol: Protocol, model: str, data: str, needs: dict[str, str]) -> dict[str, Any]:
    """Everything that decides a cell's record, files and the records that it stands on as digests."""
    return {
        "format": FORMAT,
        "method": VERSIONS.get(cell.family, VERSIONS.get(cell.method, 1)),
        "cell": asdict(cell),
        "protocol": asdict(protocol),
        "model": model,
        "data": data,
        "needs": needs,
    }


def faster_format(folder: Path, model: str) -> str:
    """``bfloat16`` where this processor runs this model clearly faster in it than in ``float32``.

    Measured once per folder of cells and model, and kept there: cells of two formats are not compared. Processor time
    counts, not the clock's, so that other work on the machine decides nothing.
    """
    kept = folder / f"format-{model_digest(model)}.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))["faster"]
    from freemoe.models.checkpoints.loading import load_base

    base, _ = load_base(model, dtype="float32", device="cpu")
    ids = torch.randint(0, base.config.vocab_size, (_TRIED // 256, 256), generator=torch.Generator().manual_seed(0))

    def seconds() -> float:
        best = float("inf")
        for _ in range(2):
            began = time.process_time()
            base(input_ids=ids, use_cache=False, logits_to_keep=1)
            best = min(best, time.process_time() - began)
        return best

    with torch.no_grad():
        full = seconds()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            half = seconds()
    found = "bfloat16" if full > _WORTH_IT * half else "float32"
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"faster": found, "tokens": _TRIED, "float32_seconds": full, "bfloat16_seconds": half}
    write_atomic(kept, json.dumps({**facts, "threads": torch.get_num_threads()}, indent=1).encode())
    return found
