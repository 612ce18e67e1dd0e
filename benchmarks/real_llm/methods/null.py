"""The null test: builds on questions whose right answers were drawn at random. Whatever they accept is a mistake.

The whole of `freemoe build` runs, with its search, its purification, its guard and Holm's correction, on a tiny base,
because it is the guard that is tested, and the guard knows nothing of the base's size.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import result_of
from benchmarks.real_llm.protocol import Job
from freemoe.domain_experts.pipeline import build
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.evals.tasks.benchmark_files import arc_jsonl

BUILDS = 10
_REFERENCE, _REPORTED = 120, 16
_FILES = ("arc/ARC-Easy/ARC-Easy-Train.jsonl", "arc/ARC-Easy/ARC-Easy-Dev.jsonl")


def null_builds(job: Job) -> dict[str, Any]:
    """Build a batch of times, each on other questions with other drawn answers; a quick protocol makes one short build."""
    rows = [row for name in _FILES for row in arc_jsonl(Path(job.root) / name)]
    quick = job.protocol.schedule.steps < 10
    found = []
    reference = 40 if quick else job.cell.documents or _REFERENCE
    for number in range(1 if quick else BUILDS):
        generator = random.Random(f"{job.cell.name}/{number}")
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            paths = _questions(rows, generator, Path(scratch), reference)
            result = _built(job.model, paths, Path(scratch) / "out", number, quick)
        found.append({**outcome(result), "build_seconds": time.perf_counter() - began})
    what = (
        f"{Path(job.model).name} as base; {reference} ARC-Easy questions, the right choice drawn at random; two subdomains, two "
        "metrics, guard at 0.05"
    )
    return {"builds": found, "reference": reference, "what": what}


def _questions(rows: list[dict[str, Any]], generator: random.Random, folder: Path, reference: int) -> str:
    drawn = generator.sample(rows, reference + _REPORTED)
    paths = []
    for name, part in (("reference", drawn[:reference]), ("test", drawn[reference:])):
        lines = []
        for row in part:
            choices = list(dict.fromkeys(row["choices"]["text"]))
            answer = generator.randrange(len(choices))
            lines.append(json.dumps({"question": row["question"], "choices": choices, "answer": answer}))
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "::".join(map(str, paths))


def _built(model: str, spec: str, output: Path, seed: int, quick: bool) -> dict[str, Any]:
    recipe = BuildRecipe.model_validate(
        {
            "model": model,
            "domains": {"null": (spec,)},
            "output": str(output),
            "seed": seed,
            "dtype": "float32",
            "device": "cpu",
            "subdomains": {"count": 1 if quick else 2},
            "bands": {"step": 0.2},
            "saliency": {"budget": 0.001 if quick else 0.01, "patience": 3},
            "evidence": {"controls": 0, "oracle": False},
        }
    )
    return result_of(build(recipe))


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """Whether a build accepted anything, and the smallest adjusted p-value of its tests."""
    subdomains = [s for domain in result["domains"] for s in domain["subdomains"]]
    adjusted = [v["holm"] for s in subdomains for v in s["verdicts"]]
    return {
        "accepted": any(s["chosen"] != "base" for s in subdomains),
        "p": min(adjusted, default=1.0),
        "tests": len(adjusted),
    }
