"""T9: what a conversion keeps of the dense model, beside every rival at the same active share and the same text.

Two models: stories260k on TinyStories, a real pretrained one, and the bundled model on its own domains. Three seeds each, a
seed being another division of the text and another training. A figure is met when the whole 95 % interval over seeds says
that the conversion is better than the best rival, or that more steps of training made it better. Rivals are not trained: they
have nothing to train, and see the same text.

Every conversion is kept when it is done (``--cells``, ``--only``, ``--minutes``), so that a run that was stopped goes on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Figure, Outcome, Settings, not_measured
from benchmarks.tomoe.conversions import EXPERTS, JUDGED_SHARE, QUICK, TRAIN, Job, run_all
from freemoe.assets import BUNDLED, DOMAINS, benchmark_path
from freemoe.evals.statistics import over_seeds
from freemoe.tomoe.recipe import ConvertRecipe

SHARES = (0.7, 0.6, 0.5, 0.4)
SEEDS = 3
# The paper keeps 56.07 of 69.00 points at half of the weights (Llama-2-7B, Tab. 2).
KEPT = 81.0
MORE_STEPS = (120, 480, 1920)
QUICK_STEPS = (QUICK["steps"], 2 * QUICK["steps"])


def run(settings: Settings) -> Outcome:
    """Convert both models to every share, and to one share with more steps, with every seed."""
    folder = settings.cells or settings.cache / "tomoe-cells"
    folder.mkdir(parents=True, exist_ok=True)
    sources = {"demo": (BUNDLED, (bundled_text(folder),))}
    if settings.data_root is not None and not settings.quick:
        text = settings.data_root / "tinystories" / "tiny_stories_train_excerpt.txt"
        sources["stories260k"] = (str(settings.data_root / "models" / "stories260k"), (str(text),))
    shares, seeds = ((JUDGED_SHARE,), 1) if settings.quick else (SHARES, SEEDS)
    steps = QUICK_STEPS if settings.quick else MORE_STEPS
    until = None if settings.minutes is None else time.time() + 60 * settings.minutes
    # What all shares need first, then long trainings.
    wanted = [(share, steps[0]) for share in shares] + [(JUDGED_SHARE, many) for many in steps[1:]]
    jobs = [
        Job(base, model, text, share, many, settings.seed + seed, str(folder), settings.quick, until)
        for share, many in wanted
        for base, (model, text) in sources.items()
        for seed in range(seeds)
    ]
    results = run_all(jobs, settings)
    figures: list[Figure] = []
    table = []
    for base in sources:
        for share in shares:
            mine = [r for r in results if (r["base"], r["active"], r["steps"]) == (base, share, steps[0])]
            found, row = judged(base, share, mine) if mine else ([_missing(base, share, steps[0])], {})
            figures += found
            table.append(row)
        figures += improving(base, [r for r in results if (r["base"], r["active"]) == (base, JUDGED_SHARE)], steps)
    if "stories260k" not in sources and not settings.quick:
        figures.append(Figure("stories260k", math.nan, 1.0, note="needs the real model: --data-root FOLDER"))
    return Outcome(tuple(figures), {"experts": EXPERTS, "training": TRAIN, "table": table, "runs": results})


def _missing(base: str, share: float, steps: int) -> Figure:
    note = "not measured yet: run again without --only and --minutes"
    return not_measured(f"T9 {base}, {share:.0%} active, {steps} steps", 0.0, " nats", note)


def improving(base: str, runs: Sequence[dict[str, Any]], steps: Sequence[int]) -> list[Figure]:
    """Test loss after each number of steps, and whether it fell from each to the next: seed by seed.

    Judged by the test text, which decided nothing; the loss on the text that settled which state is kept stands in the notes.
    """
    losses = {many: {r["seed"]: r["nll"]["converted"] for r in runs if r["steps"] == many} for many in steps}
    selecting = {many: {r["seed"]: r["held_out"] for r in runs if r["steps"] == many} for many in steps}
    at = f"T9 {base}, {JUDGED_SHARE:.0%} active"
    figures = []
    for many, found in losses.items():
        mean = float(np.mean(list(found.values()))) if found else math.nan
        note = ", ".join(
            f"seed {seed} {loss:.4f} ({selecting[many][seed]:.4f} where the state was chosen)"
            for seed, loss in sorted(found.items())
        )
        figures.append(Figure(f"{at}: test loss after {many} steps", mean, unit=" nats", digits=4, note=note))
    for fewer, more in pairwise(steps):
        shared = sorted(losses[fewer].keys() & losses[more].keys())
        if not shared:
            figures.append(_missing(base, JUDGED_SHARE, more))
            continue
        fall = over_seeds([losses[fewer][seed] - losses[more][seed] for seed in shared])
        there = float(np.mean([selecting[fewer][seed] - selecting[more][seed] for seed in shared]))
        name = f"{at}: test loss falls from {fewer} to {more} steps, lower end of the 95 % interval"
        note = f"mean {fall.mean:.4f} over {len(shared)} seeds; {there:.4f} where the state was chosen"
        figures.append(Figure(name, fall.low, 0.0, unit=" nats", digits=4, note=note))
    return figures


def bundled_text(folder: Path) -> str:
    """The reference items of the bundled benchmark as text; its test items are not in it."""
    lines = [
        json.dumps({"text": r["prompt"] + r["target"] if "target" in r else r["question"] + r["choices"][r["answer"]]})
        for domain in DOMAINS
        for r in map(json.loads, benchmark_path(domain, "reference").read_text(encoding="utf-8").splitlines())
    ]
    path = folder / "bundled.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def bundled_recipe(folder: Path, active: float, experts: int, train: dict[str, Any], seed: int) -> ConvertRecipe:
    """The conversion of the bundled model on its own reference items, without rivals, into a folder."""
    return ConvertRecipe.model_validate(
        {
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
        }
    )


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
    below = f"T9 {at}: nats per token below the best rival, lower end of the 95 % interval"
    note = f"mean {margin.mean:.3f} over {len(runs)} seeds; perplexity: {shown}"
    figures = [Figure(below, margin.low, 0.0, unit=" nats", digits=3, note=note)]

    def per_cent(what: str, value: float, target: float | None = None, note: str = "") -> None:
        figures.append(Figure(f"T9 {at}: {what}", value, target, unit=" %", digits=1, note=note))

    target, note = KEPT if share == JUDGED_SHARE else None, f"95 % over seeds [{kept.low:.1f}, {kept.high:.1f}]"
    per_cent("share of the dense model's next-token accuracy", kept.mean, target, note)
    running = 100 * float(np.mean([r["share_at_run_time"] for r in runs]))
    per_cent("of the linears runs per token, routers and gates included", running)
    tasks = [100 * r["tasks"]["converted"] / r["tasks"]["dense"] for r in runs if "tasks" in r]
    if tasks:
        per_cent("share of the dense model's accuracy on its tasks", float(np.mean(tasks)))
    row = {"model": name, "active": share, "margin": vars(margin), "kept": vars(kept), "perplexity": perplexities}
    return figures, row
