"""T7: what switched-off weights gain on documents that nothing was chosen by, and what LoRA and full tuning gain.

* T7: `freemoe build` on fresh bases of the demo's kind with fresh items, the three domains together.
* T7b: perplexity of a real model on two texts, at most 1 % of its weights off.
* T7c: the share of LoRA's gain (rank 1) in nats per token that switches reach, at 1 % and at 3 % off.
* T7d: accuracy of the same model on two tasks of choice, beside LoRA.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gain.bases import SEEDS, benchmark_specs, fresh_bases
from benchmarks.gain.contest import Job, compete, side_by_side
from benchmarks.harness import Figure, Outcome, Settings, not_measured, result_of
from benchmarks.real_llm.figures.mixtures import perplexity
from benchmarks.rivals.rival import Schedule
from benchmarks.shares import gain_interval, shown
from freemoe.domain_experts.prove.evidence import mean_gain
from freemoe.evals.statistics import Interval, exponential, over_seeds

TEXTS = {"wikitext": 0.22, "gsm8k": 0.08}
TASKS = {"gsm8k-matching": 9.0, "arc-easy": None}
RATES = (1e-2, 5e-3, 2e-3)
# Beside the rival that the targets name, tried at one rate each.
_LARGER_RATE, _FULL_RATE = 5e-3, 1e-3
_TEXT_BUDGETS = (0.01, 0.03)
_TASK_BUDGET = 0.02


def run(settings: Settings) -> Outcome:
    """Measure T7, and where there is a data folder T7b to T7d."""
    figures, details = demo_gain(settings)
    if settings.data_root is None:
        note = "they need real text and a real model: --data-root FOLDER"
        return Outcome((*figures, not_measured("T7b, T7c, T7d", 1.0, "x", note)), details)
    for part in (text_gain, task_gain):
        found, more = part(settings)
        figures += found
        details |= more
    return Outcome(tuple(figures), details)


# -------------------------------------------------------------------------------------------- T7


def demo_gain(settings: Settings) -> tuple[list[Figure], dict[str, Any]]:
    """Build the demo's three domains for every fresh base; the mean over bases of the average gain in points."""
    seeds = SEEDS[:1] if settings.quick else SEEDS
    folders = fresh_bases(settings.cache, seeds, settings.quick, settings.progress)
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [
            {
                "model": str(folder / "demo_model"),
                "domains": benchmark_specs(folder),
                "output": str(Path(scratch) / str(seed)),
                "seed": settings.seed,
                "dtype": "float32",
                "device": "cpu",
                "threads": 1,
                "data": {"limit": 24 if settings.quick else None},
                "subdomains": {"by": "field"},
            }
            for seed, folder in folders.items()
        ]
        results = side_by_side(built, jobs, settings.progress, "builds on fresh bases")
    # Bases and domains count the same.
    domains = [domain for result in results for domain in result["domains"]]
    rows = {row: mean_gain(domains, row) for row in ("routed", "expert", "control", "oracle")}
    by_base = [float(np.mean([mean_gain([d], "routed").mean for d in r["domains"]])) for r in results]
    routed = rows["routed"]
    beside = ", ".join(f"{row} {shown(rows[row])}" for row in ("expert", "control", "oracle"))
    spread = over_seeds(by_base)
    note = f"{len(seeds)} fresh bases: {', '.join(f'{g:+.2f}' for g in by_base)}; {beside}"
    figures = [
        Figure("T7 demo domains, average held-out gain (routed)", routed.mean, 2.04, unit=" points", note=note),
        Figure("T7 lower end of its 95 % interval over documents", routed.low, 0.0, unit=" points"),
        Figure("T7 lower end of its 95 % interval over bases (t)", spread.low, 0.0, unit=" points"),
    ]
    kept = [
        {"seed": seed, "domains": [{"name": d["name"], "rows": d["rows"]} for d in r["domains"]], "cost": r["cost"]}
        for seed, r in zip(seeds, results, strict=True)
    ]
    return figures, {"demo": kept}


def built(recipe: dict[str, Any]) -> dict[str, Any]:
    """Build one base's experts and return the result (in a process of its own)."""
    from freemoe.domain_experts.pipeline import build
    from freemoe.domain_experts.recipe import BuildRecipe

    return result_of(build(BuildRecipe.model_validate(recipe)))


# -------------------------------------------------------------------------------------- T7b, T7c


def text_gain(settings: Settings) -> tuple[list[Figure], dict[str, Any]]:
    """Switches, LoRA and full tuning on two texts; LoRA of rank 1 at the one of three learning rates that stopped best."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    jobs = []
    for text in TEXTS:
        job = _job(settings, text)
        jobs += [job, *(replace(job, method="learned", budget=b) for b in _TEXT_BUDGETS)]
        jobs += [replace(job, method="lora", rank=1, rate=rate) for rate in RATES[: 1 if settings.quick else None]]
        jobs += [replace(job, method="lora", rank=4, rate=_LARGER_RATE), replace(job, method="full", rate=_FULL_RATE)]
    results = side_by_side(compete, jobs, settings.progress, "methods on text")
    for text, target in TEXTS.items():
        mine = [r for r in results if r["job"]["material"] == text]
        base = mine[0]
        table = [_text_row(r, base) for r in chosen(mine)]
        by_name = {row["method"]: row for row in table}
        switches = [Job("", "", "learned", budget=b).name for b in _TEXT_BUDGETS]
        one, three, lora = (by_name[n] for n in (*switches, "LoRA r=1"))
        name = f"T7b {text}: held-out perplexity / base perplexity, switches, <= 1 % off"
        note = (
            f"{perplexity(base):.2f} -> {one['perplexity']:.2f}, {one['share_off']:.2%} off, "
            f"95 % [{one['ratio']['low']:.3f}, {one['ratio']['high']:.3f}]; LoRA r=1 {lora['ratio']['mean']:.3f}"
        )
        figures.append(Figure(name, one["ratio"]["mean"], target, "lower", digits=3, note=note))
        for row, least in ((one, 95.0), (three, 100.0)):
            name, mine, theirs = f"T7c {text}: share of LoRA r=1's gain, {row['method']}", row["gain"], lora["gain"]
            note = f"{mine['mean']:.3f} of {theirs['mean']:.3f} nats per token ({lora['note']})"
            share = 100 * mine["mean"] / theirs["mean"]
            figures.append(Figure(name, share, least, unit=" %", digits=1, note=note))
        details[text] = {"table": table, "losses": {r["name"]: r["losses"] for r in mine}}
    return figures, details


def _job(settings: Settings, material: str) -> Job:
    assert settings.data_root is not None
    quick = Schedule(steps=4, step_tokens=512, every=2, patience=1)
    job = Job(material, str(settings.data_root), seed=settings.seed)
    return replace(job, schedule=quick, limit=16) if settings.quick else job


def chosen(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result per method: among learning rates the one with the best stopping loss, not the best reported one."""
    best: dict[str, dict[str, Any]] = {}
    for result in results:
        name = result["name"].split(", lr")[0]
        if name not in best or min(result["losses"]) < min(best[name]["losses"]):
            best[name] = result
    return list(best.values())


def _text_row(result: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    gain = gain_interval(np.subtract(base["nll"], result["nll"]), base["keys"], base["tokens"])
    ratio = exponential(gain.scaled(-1))
    return {**_row(result), "perplexity": perplexity(result), "ratio": vars(ratio), "gain": vars(gain)}


def _row(result: dict[str, Any]) -> dict[str, Any]:
    job = result["job"]
    return {
        "method": result["name"].split(", lr")[0],
        "note": f"lr {job['rate']:g}" if job["rate"] else "",
        "stopping_loss": min(result["losses"], default=None),
        "rounds": len(result["losses"]),
        **{k: result.get(k) for k in ("share_off", "numbers", "bytes", "seconds", "extra_bytes")},
    }


# ------------------------------------------------------------------------------------------- T7d


def task_gain(settings: Settings) -> tuple[list[Figure], dict[str, Any]]:
    """Switches and LoRA r = 1 on two tasks of choice, learned from right answers as text."""

    def points(result: dict[str, Any], over: dict[str, Any]) -> Interval:
        return gain_interval(np.subtract(result["right"], over["right"]), over["keys"])

    jobs = []
    for task in TASKS:
        job = _job(settings, task)
        jobs += [job, replace(job, method="learned", budget=_TASK_BUDGET)]
        jobs += [replace(job, method="lora", rate=rate) for rate in RATES[: 1 if settings.quick else 2]]
    results = side_by_side(compete, jobs, settings.progress, "methods on questions")
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for task, target in TASKS.items():
        base, switches, lora = chosen([r for r in results if r["job"]["material"] == task])
        gain = points(switches, base)
        rival = points(lora, base)
        apart = points(switches, lora)
        start = 100 * float(np.mean(base["right"]))
        note = f"{start:.1f} -> {start + gain.mean:.1f} on {len(base['right'])} items, {switches['share_off']:.2%} off"
        upper = "upper end of the 95 % interval of switches - LoRA r=1"
        beside = f"switches - LoRA {shown(apart, 1)}; LoRA alone {shown(rival, 1)} ({_row(lora)['note']})"
        figures += [
            Figure(f"T7d {task}: held-out gain in accuracy", gain.mean, target, unit=" points", digits=1, note=note),
            Figure(f"T7d {task}: lower end of its 95 % interval", gain.low, 0.0, unit=" points", digits=1),
            Figure(f"T7d {task}: {upper}", apart.high, 0.0, unit=" points", digits=1, note=beside),
        ]
        gains = {"base": None, "switches": vars(gain), "LoRA r=1": vars(rival)}
        table = [{**_row(r), "gain": g} for r, g in zip((base, switches, lora), gains.values(), strict=True)]
        details[task] = {"base_accuracy": start, "table": table}
    return figures, details
