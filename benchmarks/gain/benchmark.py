"""T7: what switched-off weights gain on documents that nothing was chosen by, and what LoRA and full tuning gain.

* T7: `freemoe build` on fresh bases of the demo's kind with fresh items, the three domains together.
* T7b: perplexity of a real model on two texts, at most 1 % of its weights off.
* T7c: the share of LoRA's gain (rank 1) in nats per token that switches reach, at 1 % and at 3 % off.
* T7d: accuracy of the same model on two tasks of choice, beside LoRA.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gain.bases import SEEDS, benchmark_specs, fresh_bases
from benchmarks.gain.contest import Job, compete, side_by_side
from benchmarks.harness import Figure, Outcome, Settings
from benchmarks.rivals.training import Schedule
from freemoe.domain_experts.prove.evidence import mean_gain
from freemoe.evals.statistics import Interval, exponential, mean_interval, over_seeds

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
        lost = Figure("T7b, T7c, T7d", math.nan, note="they need real text and a real model: --data-root FOLDER")
        return Outcome((*figures, replace(lost, target=1.0)), details)
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
                "command": "build",
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
    rows = {row: _over_bases(results, row) for row in ("routed", "expert", "control", "oracle")}
    by_base = [float(np.mean([_gain(d, "routed") for d in r["domains"]])) for r in results]
    routed = rows["routed"]
    beside = ", ".join(f"{row} {_shown(rows[row])}" for row in ("expert", "control", "oracle"))
    spread = over_seeds(by_base)
    figures = [
        Figure(
            "T7 demo domains, average held-out gain (routed)",
            routed.mean,
            2.04,
            unit=" points",
            note=f"{len(seeds)} fresh bases: {', '.join(f'{g:+.2f}' for g in by_base)}; {beside}",
        ),
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
    from freemoe.recipes import recipe_from

    found = recipe_from(recipe, "The benchmark")
    assert isinstance(found, BuildRecipe)
    return json.loads((build(found) / "result.json").read_text(encoding="utf-8"))


def _gain(domain: dict[str, Any], row: str) -> float:
    return mean_gain([domain], row).mean


def _over_bases(results: list[dict[str, Any]], row: str) -> Interval:
    """Mean over bases and domains, each counting the same."""
    return mean_gain([domain for result in results for domain in result["domains"]], row)


def _shown(interval: Interval, digits: int = 2) -> str:
    ends = f" [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]" if math.isfinite(interval.low) else ""
    return f"{interval.mean:+.{digits}f}{ends}"


# -------------------------------------------------------------------------------------- T7b, T7c


def text_gain(settings: Settings) -> tuple[list[Figure], dict[str, Any]]:
    """Switches, LoRA and full tuning on two texts; LoRA of rank 1 at the one of three learning rates that stopped best."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    jobs = []
    for text in TEXTS:
        job = _job(settings, text)
        jobs += [job, *(replace(job, method="learned", budget=b) for b in _TEXT_BUDGETS)]
        jobs += [replace(job, method="lora", rank=1, rate=rate) for rate in _rates(settings, RATES)]
        jobs += [replace(job, method="lora", rank=4, rate=_LARGER_RATE), replace(job, method="full", rate=_FULL_RATE)]
    results = side_by_side(compete, jobs, settings.progress, "methods on text")
    for text, target in TEXTS.items():
        mine = [r for r in results if r["job"]["material"] == text]
        base = mine[0]
        table = [_text_row(r, base, settings.seed) for r in chosen(mine)]
        by_name = {row["method"]: row for row in table}
        one, three, lora = (by_name[n] for n in (*_switch_names(), "LoRA r=1"))
        figures.append(
            Figure(
                f"T7b {text}: held-out perplexity / base perplexity, switches, <= 1 % off",
                one["ratio"]["mean"],
                target,
                "lower",
                digits=3,
                note=f"{perplexity(base):.2f} -> {one['perplexity']:.2f}, {one['share_off']:.2%} off, "
                f"95 % [{one['ratio']['low']:.3f}, {one['ratio']['high']:.3f}]; LoRA r=1 {lora['ratio']['mean']:.3f}",
            )
        )
        for row, least in ((one, 95.0), (three, 100.0)):
            figures.append(
                Figure(
                    f"T7c {text}: share of LoRA r=1's gain, {row['method']}",
                    100 * row["gain"]["mean"] / lora["gain"]["mean"],
                    least,
                    unit=" %",
                    digits=1,
                    note=f"{row['gain']['mean']:.3f} of {lora['gain']['mean']:.3f} nats per token ({lora['note']})",
                )
            )
        details[text] = {"table": table, "losses": {r["name"]: r["losses"] for r in mine}}
    return figures, details


def _switch_names() -> list[str]:
    return [Job("", "", "learned", budget=b).name for b in _TEXT_BUDGETS]


def _job(settings: Settings, material: str) -> Job:
    assert settings.data_root is not None
    quick = Schedule(steps=4, step_tokens=512, every=2, patience=1)
    job = Job(material, str(settings.data_root), seed=settings.seed)
    return replace(job, schedule=quick, limit=16) if settings.quick else job


def _rates(settings: Settings, rates: tuple[float, ...]) -> tuple[float, ...]:
    return rates[:1] if settings.quick else rates


def chosen(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result per method: among learning rates the one with the best stopping loss, not the best reported one."""
    best: dict[str, dict[str, Any]] = {}
    for result in results:
        name = result["name"].split(", lr")[0]
        if name not in best or min(result["losses"]) < min(best[name]["losses"]):
            best[name] = result
    return list(best.values())


def perplexity(result: dict[str, Any]) -> float:
    """Perplexity on the reported documents."""
    return math.exp(sum(result["nll"]) / sum(result["tokens"]))


def _text_row(result: dict[str, Any], base: dict[str, Any], seed: int) -> dict[str, Any]:
    each = np.subtract(base["nll"], result["nll"]) / base["tokens"]
    gain = mean_interval(each.tolist(), base["keys"], base["tokens"])
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
    jobs = []
    for task in TASKS:
        job = _job(settings, task)
        jobs += [job, replace(job, method="learned", budget=_TASK_BUDGET)]
        jobs += [replace(job, method="lora", rate=rate) for rate in _rates(settings, RATES[:2])]
    results = side_by_side(compete, jobs, settings.progress, "methods on questions")
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for task, target in TASKS.items():
        base, switches, lora = chosen([r for r in results if r["job"]["material"] == task])
        gain = _points(switches, base, settings.seed)
        rival = _points(lora, base, settings.seed)
        apart = _points(switches, lora, settings.seed)
        start = 100 * float(np.mean(base["right"]))
        note = f"{start:.1f} -> {start + gain.mean:.1f} on {len(base['right'])} items, {switches['share_off']:.2%} off"
        figures += [
            Figure(f"T7d {task}: held-out gain in accuracy", gain.mean, target, unit=" points", digits=1, note=note),
            Figure(f"T7d {task}: lower end of its 95 % interval", gain.low, 0.0, unit=" points", digits=1),
            Figure(
                f"T7d {task}: upper end of the 95 % interval of switches - LoRA r=1",
                apart.high,
                0.0,
                unit=" points",
                digits=1,
                note=f"switches - LoRA {_shown(apart, 1)}; LoRA alone {_shown(rival, 1)} ({_row(lora)['note']})",
            ),
        ]
        gains = {"base": None, "switches": vars(gain), "LoRA r=1": vars(rival)}
        table = [{**_row(r), "gain": g} for r, g in zip((base, switches, lora), gains.values(), strict=True)]
        details[task] = {"base_accuracy": start, "table": table}
    return figures, details


def _points(result: dict[str, Any], base: dict[str, Any], seed: int) -> Interval:
    differences = [a - b for a, b in zip(result["right"], base["right"], strict=True)]
    return mean_interval(differences, base["keys"]).scaled(100)
