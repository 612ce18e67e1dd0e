"""One method on one material, in a process of its own: so that its time and its memory are its own.

All methods read the same documents (`real`), follow the same rule of stopping (`rivals.Schedule`) and are scored by
the same scorer on the same reported documents.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from unittest import mock

import torch

from benchmarks.gain.materials import MODEL, read_material
from benchmarks.real_llm.data import needed
from benchmarks.real_llm.methods.weights import per_document
from benchmarks.rivals.rival import RIVALS, Fitted, Materials, Schedule, Terms
from freemoe.core.memory import peak_memory_bytes
from freemoe.core.run.progress import Progress
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches, mean_loss
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document
from freemoe.evals.tasks.task import TaskGrader, grade_choice
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.weights import find_weights

Method = Literal["base", "learned", "lora", "full"]

_BATCH_TOKENS = 4096
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What to train, on what."""

    material: str  # A name of ``materials.MATERIALS``
    root: str  # The data folder
    method: Method = "base"  # ``base`` trains nothing; ``learned`` switches weights off; ``lora`` and ``full`` train
    budget: float = 0.01  # Largest share of the weights off
    rank: int = 1  # Of LoRA
    rate: float = 0.0  # Learning rate of LoRA or full tuning
    seed: int = 0  # Of splits and steps
    limit: int | None = None  # Documents at most, for a quick run
    schedule: Schedule = field(default_factory=Schedule)  # How long to train

    @property
    def name(self) -> str:
        """Short name of the method and what sets it apart."""
        if self.method == "learned":
            return f"switches, learned, {self.budget:.0%} off"
        names = {"base": "base", "lora": f"LoRA r={self.rank}", "full": "all linears tuned"}
        return names[self.method] + (f", lr {self.rate:g}" if self.rate else "")


_RIVALS = {"learned": "switches-learned", "lora": "lora", "full": "full"}
"""Our methods' names, and those of their rows among the rivals."""


def compete(job: Job) -> dict[str, Any]:
    """Run one job on one thread.

    Returns:
        The job's name and settings; ``losses`` on the stopping documents; ``numbers`` and ``bytes`` that the result
        ships; ``seconds`` of training; ``extra_bytes``, the peak of memory over scoring alone; per reported document
        ``nll`` and ``tokens`` (text) or ``right`` (choice).
    """
    torch.set_num_threads(1)
    root = Path(job.root)
    model, tokenizer = load_base(needed(root, MODEL), dtype="float32", device="cpu")
    scorer = Scorer(model, tokenizer, batch_tokens=_BATCH_TOKENS)
    material = read_material(job.material, root, scorer, job.seed, job.limit)

    def batches(pairs: Sequence[Any]) -> list[AnswerBatch]:
        rows = [(scorer.fit_to_context(pair).inputs, pair.continuation) for pair in pairs]
        return answer_batches(rows, [0] * len(rows), _BATCH_TOKENS, "cpu")

    # Texts as tokens instead of documents: nothing but `batches` looks into them.
    gradient, stop = cast("tuple[Any, ...]", tuple(material.gradient)), cast("tuple[Any, ...]", tuple(material.stop))
    weights = find_weights(model)
    materials = Materials("text", tokenizer, scorer.max_length, weights, gradient, stop, batches, alone=True)
    terms = Terms(job.budget, job.rank, job.rate, job.seed, job.schedule)
    mean_loss(model, batches(material.stop))
    scored = peak_memory_bytes()
    base = job.method == "base"
    fit = nullcontext(Fitted()) if base else RIVALS.get(_RIVALS[job.method]).on(model, materials, terms)
    began = time.perf_counter()
    with fit as fitted:
        more = {} if base else {"seconds": time.perf_counter() - began}
        if job.method == "learned":
            more["share_off"] = fitted.share_off
        if fitted.model is not None:
            scorer = Scorer(fitted.model, tokenizer, batch_tokens=_BATCH_TOKENS)
        after = _score(scorer, material.reported)
    shipped = {"numbers": fitted.numbers, "bytes": fitted.bytes, "losses": list(fitted.losses)}
    extra = {"extra_bytes": peak_memory_bytes() - scored}
    return {"job": asdict(job), "name": job.name, **shipped, **more, **extra, **after}


def _score(scorer: Scorer, documents: Sequence[Document]) -> dict[str, Any]:
    grader = TaskGrader(documents[0].task, "acc", lambda d, found: grade_choice(d, found, [len(a) for a in d.answers]))
    scores = Evaluator(scorer, {grader.name: grader}).score(documents)
    return {"keys": [d.key for d in documents], **per_document(documents[0].kind, scores)}


def one_thread_each() -> AbstractContextManager[Any]:
    """Let processes that start inside begin with one thread, as each has one core."""
    return mock.patch.dict(os.environ, OMP_NUM_THREADS="1")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(work: Callable[[Any], T], jobs: Sequence[Any], progress: Progress, stage: str) -> list[T]:
    """Run every job in a fresh process, one per core at a time; results in the order of the jobs."""
    context = multiprocessing.get_context("spawn")
    with (
        one_thread_each(),
        progress.stage(stage, len(jobs)) as advance,
        ProcessPoolExecutor(min(cores(), len(jobs)), mp_context=context, max_tasks_per_child=1) as pool,
    ):
        futures = {pool.submit(work, job): i for i, job in enumerate(jobs)}
        results: dict[int, T] = {}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            advance(1)
    return [results[i] for i in range(len(jobs))]
