"""One cell measured, in a process of its own: so that its time and its memory are its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_llm.data import parts_of
from benchmarks.real_llm.methods.weights import Stand, per_document
from benchmarks.real_llm.work import Job
from benchmarks.rivals.plan import MATERIALS
from benchmarks.rivals.rival import RIVALS, Materials, Terms
from freemoe.core.errors import DataError
from freemoe.core.memory import free_now, peak_memory_bytes, reset_peak_memory, used_memory_bytes
from freemoe.domain_experts.purify.batches import mean_loss
from freemoe.evals.engine.scorer import Scorer
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.weights import find_weights


def measure_rival(job: Job) -> dict[str, Any]:
    """Fit a rival on the reference documents and score it on those that nothing chose by.

    Returns:
        The cell's record: per reported document ``nll`` and ``tokens`` or ``right``; ``losses``, ``numbers``, ``bytes``,
        ``share_off``; ``seconds`` of the fit, and ``memory_bytes``, its peak above the loaded base.
    """
    rival = RIVALS.get(job.cell.method)
    model, tokenizer = load_base(job.model, dtype="float32", device="cpu")
    if tokenizer is None:
        raise DataError(f"The base {job.model!r} has no tokenizer, and documents are text.")
    material = MATERIALS[job.cell.material]
    data = parts_of(material, material.load(Path(job.root), tokenizer, job.protocol, 0), job.protocol, job.cell.seed)
    stand = Stand(job.cell, job.protocol, model, tokenizer, find_weights(model), data)
    materials = Materials(
        material.kind,
        tokenizer,
        stand.scorer.max_length,
        stand.weights,
        tuple(data.gradient),
        tuple(data.stop),
        stand.batches,
    )
    cell, protocol = job.cell, job.protocol
    terms = Terms(cell.budget, cell.rank, cell.rate, cell.seed, stand.schedule, protocol.train)
    # Once before anything is measured: what a first pass keeps for good is the base's.
    mean_loss(model, materials.batches(materials.stop[:1]))
    free_now()
    reset_peak_memory()
    held, began = used_memory_bytes(), time.perf_counter()
    with rival.on(model, materials, terms) as fitted:
        seconds, memory = time.perf_counter() - began, max(0, peak_memory_bytes() - held)
        if fitted.model is not None:
            stand.model = fitted.model
            stand.scorer = Scorer(fitted.model, tokenizer, batch_tokens=protocol.batch_tokens)
        began = time.perf_counter()
        scores = stand.scores(fitted.prompted(data.reported))
    return {
        "kind": data.kind,
        "ids": [d.id for d in data.reported],
        "keys": [d.key for d in data.reported],
        **per_document(data.kind, scores),
        "losses": list(fitted.losses),
        "numbers": fitted.numbers,
        "bytes": fitted.bytes,
        "share_off": fitted.share_off,
        "facts": fitted.facts,
        "seconds": seconds,
        "score_seconds": time.perf_counter() - began,
        "memory_bytes": memory,
        "documents": {"gradient": len(data.gradient), "stop": len(data.stop)},
        "formats": {"train": protocol.train, "score": protocol.score, "weights": "float32"},
        "threads": torch.get_num_threads(),
        "notes": list(data.notes),
    }
