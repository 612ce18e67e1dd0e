"""T10: fewer experts per token, and what hooks win back; plans against each other; baselines; bit-equality.

Speed is `speed`'s, which runs alone as `python -m benchmarks hookmoe-speed`. Quality: the bundled mixture, and mixtures of two other
shapes that were trained on real text (`mixtures`); what is trained there is kept row by row (`records`).
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch

from benchmarks.harness import Figure, Outcome, Settings
from benchmarks.hookmoe import mixtures, speed
from benchmarks.hookmoe import quality as trim_quality
from freemoe.core.errors import RecipeError
from freemoe.hookmoe.measure import measure_quality, quality_as_json
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.dynamic import (
    act_of,
    apply_rule,
    kept_slots,
    ramp_thresholds,
    router_weights,
    tune_thresholds,
)
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.methods import describe_point, kl_drop, pareto_list
from freemoe.hookmoe.plans.plan import LayerPlan, tlnle
from freemoe.hookmoe.plans.search import pareto_front
from freemoe.hookmoe.recipe import PlanSection


def run(settings: Settings) -> Outcome:
    """Measure speed, quality, plans, baselines and bit-equality, or the parts of ``--only``.

    Raises:
        RecipeError: ``--only`` names none.
    """
    figures: list[Figure] = []
    details: dict[str, Any] = {"threads": torch.get_num_threads()}
    if settings.wants("speed"):
        figures.append(_undone(speed.shaped("Mixtral shape", settings)))
        timed = speed.run(settings)
        figures += timed.figures
        details["speed"] = timed.details
    if settings.wants("bundled"):
        figures.append(_formulas())
        bench = trim_quality.prepare(settings)
        figures.append(_undone(bench.model, "bundled mixture"))
        found, details["plans"] = _plans(bench, settings)
        figures += found
        found, details["dynamic k"] = _dynamic(bench)
        figures += found
        found, details["quality"] = trim_quality.run(bench, settings)
        figures += found
    for shape in mixtures.SHAPES:
        if settings.wants(shape):
            found, details[f"quality, {shape}"] = trim_quality.on_mixture(shape, settings)
            figures += found
    if not figures:
        raise RecipeError(
            f"--only {settings.only!r} names no part of hookmoe: speed, bundled, {', '.join(mixtures.SHAPES)}."
        )
    return Outcome(tuple(figures), details)


def _undone(model: Any, name: str = "93M shape") -> Figure:
    """Logits that differ after every plan of one layer was applied and undone."""
    ids = torch.arange(3, 35, device=model.device)[None]

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    before, changed = logits(), 0
    base = plan_of(model)
    for layer in range(len(base.ks)):
        with apply_plan(model, base.with_k(layer, 1)):
            if torch.equal(logits(), before):
                raise RuntimeError(f"the plan with one expert in layer {layer} changed nothing")
        changed += int((logits() != before).sum())
    return Figure(f"logits that differ after plans are undone, {name}", float(changed), 0.0, "lower", "", 0)


def _formulas() -> Figure:
    """Act of the dynamic rules on routers whose ratio w2 / w1 is uniform, against the formulas."""
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(400_000, generator=generator, dtype=torch.float64)
    weights = torch.stack([1 / (1 + q), q / (1 + q)], dim=1)

    def act(rule: str, threshold: float) -> float:
        return float(kept_slots(rule, weights, threshold).sum() / len(weights))

    gaps = [abs(act("top_p", p) - (3 - 1 / p)) for p in (0.52, 0.6, 0.7)]
    gaps += [abs(act("rel_threshold", t) - (2 - t)) for t in (0.5, 0.6, 0.9)]
    for rule, start, formula in (("top_p", 0.7, lambda p: 3 - 1 / p), ("rel_threshold", 0.5, lambda t: 2 - t)):
        thresholds = ramp_thresholds(rule, start, range(32), 0.2).values()
        gaps.append(abs(statistics.fmean(act(rule, t) - formula(t) for t in thresholds)))
    return Figure("Act of dynamic rules against formulas, largest gap of 8", max(gaps), 0.01, "lower", "", 4)


def _plans(bench: trim_quality.Bench, settings: Settings) -> tuple[list[Figure], dict[str, Any]]:
    """The knapsack's own plans against TLNLE at equal Act; TLNLE's are left out of its side."""
    drop = kl_drop(bench.model, bench.text.held_out, bench.material.held_out_teacher, rescale=bench.rescale)
    on_test = kl_drop(bench.model, bench.text.test, bench.test_teacher, rescale=bench.rescale)
    points, profile = pareto_list(bench.model, PlanSection(act=1.0), {bench.rescale: drop}, settings.progress)
    base = plan_of(bench.model)
    rows = []
    for first in range(len(base.ks)):
        plan = tlnle(base, 2, first)
        own = min((p for p in points if p.source != "tlnle" and p.plan.act <= plan.act), key=lambda p: p.drop)
        rows.append(
            {
                "act": plan.act,
                "tlnle": plan.to_text(),
                "knapsack": own.plan.to_text(),
                "held_out": [drop(plan), own.drop],
                "test": [on_test(plan), on_test(own.plan)],
            }
        )
    worst = max(r["held_out"][1] - r["held_out"][0] for r in rows)
    on_test_worst = max(r["test"][1] - r["test"][0] for r in rows)
    best = max((r["held_out"][0] / max(r["held_out"][1], 1e-12), r["act"]) for r in rows)
    name = "held-out KL of the knapsack's plans minus TLNLE's, worst Act"
    note = f"test part {on_test_worst:+.4f}; at Act {best[1]:.2f} TLNLE's KL is {best[0]:.2f} times the knapsack's"
    figure = Figure(name, worst, 0.0, "lower", " nats", 4, note)
    record = {
        "profile": [{"layer": n, "k": k, "drop": d} for (n, k), d in profile.items()],
        "pareto": [describe_point(p) for p in pareto_front(points)],
        "against_tlnle": rows,
    }
    return [figure], record


def _dynamic(bench: trim_quality.Bench) -> tuple[list[Figure], dict[str, Any]]:
    """Beside the plans: rules that choose k per token, tuned to Act 1.5 on training text, measured on the test part."""
    weights = router_weights(bench.model, bench.text.train.select_rows(range(min(32, len(bench.text.train)))))
    found = {}
    for rule in ("top_p", "rel_threshold"):
        with apply_rule(bench.model, rule, tune_thresholds(rule, weights, 1.5)) as counts:
            quality = measure_quality(bench.model, bench.text.test, bench.test_teacher)
        found[rule] = {"act": act_of(counts), **quality_as_json(quality)}
    drop = kl_drop(bench.model, bench.text.held_out, bench.material.held_out_teacher, rescale=bench.rescale)
    base = plan_of(bench.model)
    every = [LayerPlan(p) for p in itertools.product(*([None] if k is None else range(1, k + 1) for k in base.ks))]
    plan = min([p for p in every if p.act == 1.5] or [base.with_k(0, 1)], key=drop)
    with apply_plan(bench.model, plan, bench.rescale):
        quality = measure_quality(bench.model, bench.text.test, bench.test_teacher)
    found["plan"] = {"act": plan.act, "plan": plan.to_text(), **quality_as_json(quality)}
    kl = found["rel_threshold"]["kl"] / found["plan"]["kl"]
    note = f"relative threshold tuned to Act {found['rel_threshold']['act']:.2f}, plan {plan.to_text()}; both on the test part"
    return [Figure("KL of dynamic k over the best plan's at Act 1.5", kl, note=note)], found
