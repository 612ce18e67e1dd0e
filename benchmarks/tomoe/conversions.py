"""The conversions that T9 stands on: each done once, in a process of its own, and kept as a record.

A record is one JSON file whose name is the conversion's; it counts while everything that decided it is as it was.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gain.contest import side_by_side
from benchmarks.harness import Settings, result_of
from benchmarks.kept import keep_record, read_record
from benchmarks.real_llm.protocol import file_sum, model_digest
from freemoe.assets import DOMAINS
from freemoe.core.environment import DECIDING, package_versions
from freemoe.core.errors import LockedError
from freemoe.core.files import json_digest
from freemoe.core.run.execute import NOT_DECIDING
from freemoe.core.run.lock import output_lock
from freemoe.recipes import EvalRecipe
from freemoe.tomoe.recipe import ConvertRecipe

# Asked for once per job that may be kept.
_model_digest = functools.cache(model_digest)

EXPERTS = 64
STEPS = 120
JUDGED_SHARE = 0.5
TRAIN = {"steps": STEPS, "batch_tokens": 1024, "block": 256, "save_every": 60, "evaluation_tokens": 16384}
QUICK = {**TRAIN, "steps": 2, "batch_tokens": 256, "save_every": 2, "evaluation_tokens": 1024}


@dataclass(frozen=True)
class Job:
    """One conversion."""

    base: str  # What the base is called
    model: str  # The base
    text: tuple[str, ...]  # Files that are divided into parts
    active: float  # Share of the weights that a token uses
    steps: int  # Of training
    seed: int  # Of the division and of the training
    folder: str  # Of the records
    quick: bool = False  # Small parts and items
    until: float | None = None  # When it is too late to begin, in seconds since the epoch; None: never

    @property
    def name(self) -> str:
        """As ``--only`` has it: ``stories260k/50%/120/s0``."""
        return f"{self.base}/{self.active:.0%}/{self.steps}/s{self.seed}"

    @property
    def record(self) -> Path:
        """File of its record."""
        return Path(self.folder) / f"{json_digest(self.name)}.json"

    @property
    def train(self) -> dict[str, Any]:
        """Its section of the recipe; about eight states of a long training are scored."""
        every = QUICK["save_every"] if self.quick else max(TRAIN["save_every"], self.steps // 8)
        return {**(QUICK if self.quick else TRAIN), "steps": self.steps, "save_every": every}


def run_all(jobs: Sequence[Job], settings: Settings) -> list[dict[str, Any]]:
    """The records of all jobs that are done, or that ``--only`` and ``--minutes`` let be done now, one per core at a time."""
    wanted = [j for j in jobs if settings.wants(j.name)]
    if wanted:
        side_by_side(measured, wanted, settings.progress, "conversions")
    return [found for job in jobs if (found := kept(job)) is not None]


def measured(job: Job) -> dict[str, Any] | None:
    """The job's record, made now unless it is there; None where it is too late, or another process is making it."""
    found = kept(job)
    if found is not None or (job.until is not None and time.time() > job.until):
        return found
    try:
        with output_lock(job.record), tempfile.TemporaryDirectory() as scratch:
            return keep_record(job.record, {**converted(job, Path(scratch) / "converted"), "identity": identity(job)})
    except LockedError:
        return None


def kept(job: Job) -> dict[str, Any] | None:
    """The job's record; None where there is none, or one of another recipe, model, text or version."""
    return read_record(job.record, identity(job)) if job.record.exists() else None


def identity(job: Job) -> str:
    """Digest of all that decides a record."""
    decided = recipe_of(job, Path("converted")).model_dump(
        mode="json", exclude={"model", "text", "output", *NOT_DECIDING}
    )
    text = [file_sum(Path(name)) for name in job.text]
    return json_digest([decided, text, _model_digest(job.model), package_versions(DECIDING), job.quick])


def recipe_of(job: Job, output: Path) -> ConvertRecipe:
    """The job's conversion."""
    return ConvertRecipe.model_validate(
        {
            "model": job.model,
            "text": job.text,
            "output": str(output),
            "active": job.active,
            "experts": EXPERTS,
            "seed": job.seed,
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "train": job.train,
        }
    )


def converted(job: Job, output: Path) -> dict[str, Any]:
    """Convert; what the result says, and for the bundled model its accuracy on its test items."""
    import torch

    from freemoe.tomoe.pipeline import convert

    torch.set_num_threads(1)
    result = result_of(convert(recipe_of(job, output)))
    curve = result["held_out_curve"]
    found = {
        "name": job.name,
        "base": job.base,
        "active": job.active,
        "steps": job.steps,
        "seed": job.seed,
        "share": result["parameters"]["active_share"],
        "share_at_run_time": result["parameters"]["active_share_at_run_time"],
        "nll": {n: sum(s["nll"]) / sum(s["tokens"]) for n, s in result["scores"].items()},
        "accuracy": {n: sum(s["right"]) / sum(s["tokens"]) for n, s in result["scores"].items()},
        "held_out": math.log(min(p[k] for p in curve for k in ("perplexity", "mean_perplexity") if k in p)),
        "curve": curve,
        "seconds": result["cost"]["wall_seconds"],
    }
    if job.base == "demo" and job.active == JUDGED_SHARE and job.steps in (STEPS, QUICK["steps"]):
        tasks = {"dense": job.model, "converted": str(output)}
        found["tasks"] = {name: task_accuracy(model, job.quick) for name, model in tasks.items()}
    return found


def task_accuracy(model: str, quick: bool) -> float:
    """Mean accuracy over the bundled domains' test items."""
    from freemoe.evals.evaluation import evaluate_target

    recipe = EvalRecipe.model_validate(
        {
            "artefact": model,
            "domains": {domain: f"demo:{domain}" for domain in DOMAINS},
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "seed": 0,  # the same items for the base and for every conversion
            "data": {"limit": 16 if quick else 200},
        }
    )
    return float(np.mean([d["rows"]["base"]["score"] for d in evaluate_target(recipe)["domains"]]))
