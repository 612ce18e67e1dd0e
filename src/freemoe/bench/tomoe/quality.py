"""T9: what a conversion keeps of the dense model, beside every rival at the same active share and the same text.

Two models: stories260k on TinyStories, a real pretrained one, and the bundled model on its own domains. Three seeds each, a
seed being another division of the text and another training. A figure is met when the whole 95 % interval over seeds says
that the conversion is better than the best rival. Rivals are not trained: they have nothing to train, and see the same text.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freemoe.assets import DOMAINS, benchmark_path
from freemoe.bench.gain.contest import side_by_side
from freemoe.bench.harness import Figure, Outcome, Settings
from freemoe.evals.statistics import over_seeds
from freemoe.models.checkpoints.loading import BUNDLED
from freemoe.recipes import ConvertRecipe, EvalRecipe, recipe_from

SHARES = (0.7, 0.6, 0.5, 0.4)
SEEDS = 3
# The paper keeps 56.07 of 69.00 points at half of the weights (Llama-2-7B, Tab. 2).
KEPT = 81.0
JUDGED_SHARE = 0.5
EXPERTS = 64
TRAIN = {"steps": 120, "batch_tokens": 1024, "block": 256, "save_every": 60, "evaluation_tokens": 16384}
QUICK = {**TRAIN, "steps": 2, "batch_tokens": 256, "save_every": 2, "evaluation_tokens": 1024}


@dataclass(frozen=True)
class Job:
    """One conversion: of which model, with what text, to what share, with what seed."""

    name: str
    model: str
    text: tuple[str, ...]
    active: float
    seed: int
    output: str
    quick: bool


def run(settings: Settings) -> Outcome:
    """Convert both models to every share with every seed, one conversion per core at a time."""
    with tempfile.TemporaryDirectory() as scratch:
        sources = {"demo": (BUNDLED, (bundled_text(Path(scratch)),))}
        if settings.data_root is not None and not settings.quick:
            text = settings.data_root / "tinystories" / "tiny_stories_train_excerpt.txt"
            sources["stories260k"] = (str(settings.data_root / "models" / "stories260k"), (str(text),))
        shares, seeds = ((JUDGED_SHARE,), 1) if settings.quick else (SHARES, SEEDS)
        jobs = [
            Job(name, model, text, share, settings.seed + seed, f"{scratch}/{name}-{share}-{seed}", settings.quick)
            for name, (model, text) in sources.items()
            for share in shares
            for seed in range(seeds)
        ]
        results = side_by_side(converted, jobs, settings.progress, "conversions")
    figures: list[Figure] = []
    table = []
    for name in sources:
        for share in shares:
            mine = [r for r in results if (r["name"], r["active"]) == (name, share)]
            found, row = judged(name, share, mine)
            figures += found
            table.append(row)
    if "stories260k" not in sources and not settings.quick:
        figures.append(Figure("stories260k", math.nan, 1.0, note="needs the real model: --data-root FOLDER"))
    return Outcome(tuple(figures), {"experts": EXPERTS, "training": TRAIN, "table": table, "runs": results})


def bundled_text(folder: Path) -> str:
    """The reference items of the bundled benchmark as text; its test items are not in it."""
    lines = []
    for domain in DOMAINS:
        for line in benchmark_path(domain, "reference").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            lines.append(json.dumps({"text": item_text(record)}))
    path = folder / "bundled.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def bundled_recipe(folder: Path, active: float, experts: int, train: dict[str, Any], seed: int) -> ConvertRecipe:
    """The conversion of the bundled model on its own reference items, without rivals, into a folder."""
    recipe = recipe_from(
        {
            "command": "convert",
            "model": BUNDLED,
            "text": [bundled_text(folder)],
            "output": str(folder / "converted"),
            "active": active,
            "experts": experts,
            "seed": seed,
            "dtype": "float32",
            "device": "cpu",
            "rivals": False,
            "train": train,
        },
        "The benchmark",
    )
    assert isinstance(recipe, ConvertRecipe)
    return recipe


def item_text(record: dict[str, Any]) -> str:
    """A benchmark item with its right answer."""
    if "target" in record:
        return record["prompt"] + record["target"]
    return record["question"] + record["choices"][record["answer"]]


def converted(job: Job) -> dict[str, Any]:
    """Convert in a process of its own; what the result says, and for the bundled model its accuracy on its test items."""
    import torch

    from freemoe.tomoe.convert import convert

    torch.set_num_threads(1)
    recipe = recipe_from(
        {
            "command": "convert",
            "model": job.model,
            "text": job.text,
            "output": job.output,
            "active": job.active,
            "experts": EXPERTS,
            "seed": job.seed,
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "train": QUICK if job.quick else TRAIN,
        },
        "The benchmark",
    )
    assert isinstance(recipe, ConvertRecipe)
    result = json.loads((convert(recipe) / "result.json").read_text(encoding="utf-8"))
    nll = {n: sum(s["nll"]) / sum(s["tokens"]) for n, s in result["scores"].items()}
    right = {n: sum(s["right"]) / sum(s["tokens"]) for n, s in result["scores"].items()}
    found = {
        "name": job.name,
        "active": job.active,
        "seed": job.seed,
        "share": result["parameters"]["active_share"],
        "share_at_run_time": result["parameters"]["active_share_at_run_time"],
        "nll": nll,
        "accuracy": right,
        "seconds": result["cost"]["wall_seconds"],
    }
    if job.name == "demo" and job.active == JUDGED_SHARE:
        found["tasks"] = {"dense": task_accuracy(job.model, job), "converted": task_accuracy(job.output, job)}
    return found


def task_accuracy(model: str, job: Job) -> float:
    """Mean accuracy over the bundled domains' test items."""
    from freemoe.evals.evaluation import evaluate

    recipe = recipe_from(
        {
            "command": "eval",
            "artefact": model,
            "domains": {domain: f"demo:{domain}" for domain in DOMAINS},
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "seed": 0,  # the same items for the base and for every conversion
            "data": {"limit": 16 if job.quick else 200},
        },
        "The benchmark",
    )
    assert isinstance(recipe, EvalRecipe)
    return float(np.mean([d["rows"]["base"]["score"] for d in evaluate(recipe)["domains"]]))


def judged(name: str, share: float, runs: list[dict[str, Any]]) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of one model at one share, and their row of the table."""
    rivals = [n for n in runs[0]["nll"] if n not in ("dense", "converted")]
    # The best rival of each run, by what is reported: that favours the rivals.
    margins = [min(r["nll"][n] for n in rivals) - r["nll"]["converted"] for r in runs]
    margin = over_seeds(margins)
    kept = over_seeds([100 * r["accuracy"]["converted"] / r["accuracy"]["dense"] for r in runs])
    perplexities = {n: math.exp(float(np.mean([r["nll"][n] for r in runs]))) for n in runs[0]["nll"]}
    shown = ", ".join(f"{n} {p:.2f}" for n, p in perplexities.items())
    at = f"{name}, {share:.0%} active"
    figures = [
        Figure(
            f"T9 {at}: nats per token below the best rival, lower end of the 95 % interval",
            margin.low,
            0.0,
            unit=" nats",
            digits=3,
            note=f"mean {margin.mean:.3f} over {len(runs)} seeds; perplexity: {shown}",
        ),
        Figure(
            f"T9 {at}: share of the dense model's next-token accuracy",
            kept.mean,
            KEPT if share == JUDGED_SHARE else None,
            unit=" %",
            digits=1,
            note=f"95 % over seeds [{kept.low:.1f}, {kept.high:.1f}]",
        ),
    ]
    tasks = [100 * r["tasks"]["converted"] / r["tasks"]["dense"] for r in runs if "tasks" in r]
    if tasks:
        figures.append(
            Figure(
                f"T9 {at}: share of the dense model's accuracy on its tasks", float(np.mean(tasks)), unit=" %", digits=1
            )
        )
    row = {"model": name, "active": share, "margin": vars(margin), "kept": vars(kept), "perplexity": perplexities}
    return figures, row
