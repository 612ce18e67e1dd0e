"""One method on one material, in a process of its own: so that its time and its memory are its own.

All methods read the same documents (`real`), follow the same rule of stopping (`rivals.Schedule`) and are scored by
the same scorer on the same reported documents.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from benchmarks.gain.materials import MATERIALS, MODEL, needed
from benchmarks.rivals.training import Schedule, train_lora, tune
from freemoe.core.memory import peak_memory_bytes
from freemoe.core.run.progress import Progress
from freemoe.domain_experts.expert import switch_expert
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches, mean_loss
from freemoe.domain_experts.purify.greedy import PurifyTask, greedy_purify
from freemoe.domain_experts.purify.learned import learn_switches
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.scorer import Scorer, TokenPair
from freemoe.evals.tasks.documents import Document
from freemoe.evals.tasks.task import TaskGrader, grade_choice
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights

Method = Literal["base", "greedy", "learned", "lora", "full"]

_BATCH_TOKENS = 4096
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What to train, on what.

    Attributes:
        material: A name of ``real.MATERIALS``.
        root: The data folder.
        method: ``base`` trains nothing; ``greedy`` and ``learned`` switch weights off; ``lora`` and ``full`` train.
        budget: Largest share of the weights off.
        rank: Of LoRA.
        rate: Learning rate of LoRA or full tuning.
        seed: Of splits and steps.
        given: Tokens at a block's start that are context; 0: the beginning-of-text token stands before it.
        limit: Documents at most, for a quick run.
        schedule: How long to train.
    """

    material: str
    root: str
    method: Method = "base"
    budget: float = 0.01
    rank: int = 1
    rate: float = 0.0
    seed: int = 0
    given: int = 0
    limit: int | None = None
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def name(self) -> str:
        """Short name of the method and what sets it apart."""
        if self.method in ("greedy", "learned"):
            return f"switches, {self.method}, {self.budget:.0%} off"
        names = {"base": "base", "lora": f"LoRA r={self.rank}", "full": "all linears tuned"}
        return names[self.method] + (f", lr {self.rate:g}" if self.rate else "")


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
    material = MATERIALS[job.material](root)(scorer, job.seed, job.given, job.limit)
    weights = find_weights(model)
    gradient, stop = _batches(scorer, material.gradient), _batches(scorer, material.stop)
    mean_loss(model, stop)
    scored = peak_memory_bytes()
    found: dict[str, Any] = {"job": asdict(job), "name": job.name, "numbers": 0, "bytes": 0, "losses": []}
    began = time.perf_counter()
    if job.method == "base":
        after = _score(scorer, material.reported)
    elif job.method in ("greedy", "learned"):
        switches = _switches(job, model, weights, gradient, stop)
        found["seconds"] = time.perf_counter() - began
        expert = switch_expert("expert", switches.mask)
        found |= {
            "losses": list(switches.losses),
            "numbers": switches.mask.count,
            "share_off": switches.mask.off_share(weights),
            "bytes": sum(t.numel() * t.element_size() for t in expert.to_tensors().values()),
        }
        with switched_off(weights, switches.mask):
            after = _score(scorer, material.reported)
    else:
        if job.method == "lora":
            model, parameters, losses = train_lora(
                model, weights, gradient, stop, job.rank, job.rate, job.schedule, job.seed
            )
        else:
            parameters = [w.parameter for w in weights]
            losses = tune(model, parameters, gradient, stop, job.rate, job.schedule, job.seed)
        found["seconds"] = time.perf_counter() - began
        numbers = sum(p.numel() for p in parameters)
        # Two bytes each: what a checkpoint in bfloat16 ships, though training was in float32.
        found |= {"losses": losses, "numbers": numbers, "bytes": 2 * numbers}
        merged = model.merge_and_unload() if job.method == "lora" else model
        after = _score(Scorer(merged, tokenizer, batch_tokens=_BATCH_TOKENS), material.reported)
    return {**found, "extra_bytes": peak_memory_bytes() - scored, **after}


def _switches(job: Job, model: Any, weights: list, gradient: list[AnswerBatch], stop: list[AnswerBatch]) -> Any:
    task = PurifyTask(model, weights, gradient, stop, seed=job.seed)
    if job.method == "greedy":
        return greedy_purify(task, SaliencySection(step=3e-4, budget=job.budget, checkpointing=False))
    section = SaliencySection(
        budget=job.budget,
        steps=job.schedule.steps,
        step_tokens=job.schedule.step_tokens,
        every=job.schedule.every,
        patience=job.schedule.patience,
        checkpointing=False,
    )
    return learn_switches(task, section)


def _batches(scorer: Scorer, pairs: Sequence[TokenPair]) -> list[AnswerBatch]:
    rows = [(scorer.fit_to_context(pair)[0], pair.continuation) for pair in pairs]
    return answer_batches(rows, [0] * len(rows), _BATCH_TOKENS, "cpu")


def _score(scorer: Scorer, documents: Sequence[Document]) -> dict[str, Any]:
    grader = TaskGrader(documents[0].task, "acc", lambda d, found: grade_choice(d, found, [len(a) for a in d.answers]))
    scores = Evaluator(scorer, {grader.name: grader}).score(documents)
    keys = [d.key for d in documents]
    if documents[0].kind == "text":
        return {"keys": keys, "nll": [-s.loglikelihood for s in scores], "tokens": [s.tokens for s in scores]}
    return {"keys": keys, "right": [s.value for s in scores]}


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let processes that start inside begin with one thread, as each has one core."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


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
