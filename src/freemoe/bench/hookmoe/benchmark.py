"""T10: fewer experts per token, and what hooks win back; plans against each other; baselines; bit-equality.

Speed: a random Mixtral of 93 million parameters, batch 1, k = 2 against k = 1 with hooks on, in turns in one process. Both
sides run their experts by `compact_mm`, our own, and then both as transformers does. The ceiling beside each ratio is what its
FLOPs (first token) or bytes (further tokens) allow. Quality: the bundled mixture, and mixtures of two other shapes
that were trained on real text (`mixtures`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from freemoe.bench.harness import Figure, Outcome, Settings, in_turns, ratio
from freemoe.bench.hookmoe import mixtures
from freemoe.bench.hookmoe import quality as trim_quality
from freemoe.bench.speed.shapes import random_model
from freemoe.compat.transformers import experts_way
from freemoe.hookmoe.adapter import Trimmed
from freemoe.hookmoe.hooks.hook import allocate, new_hooks
from freemoe.hookmoe.measure import measure
from freemoe.hookmoe.metrics import count_parameters, request
from freemoe.hookmoe.plans.apply import applied, plan_of
from freemoe.hookmoe.plans.compact import NAME, skipping
from freemoe.hookmoe.plans.dynamic import Dynamic, act_of, kept_slots, ramp, router_weights, tuned
from freemoe.hookmoe.plans.methods import default_units, describe_point, kl_drop, pareto_list
from freemoe.hookmoe.plans.plan import Plan, tlnle, uniform
from freemoe.hookmoe.plans.search import pareto
from freemoe.recipes import PlanSection

TTFT, ITL = 1.42, 1.3
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
NEW = 33


def run(settings: Settings) -> Outcome:
    """Measure speed, quality, plans, baselines and bit-equality."""
    figures: list[Figure] = []
    details: dict[str, Any] = {"threads": torch.get_num_threads()}
    model = random_model("mixtral", settings.seed, **SHAPE | (SMALL if settings.quick else {}))
    figures.append(_undone(model))
    for length in (16,) if settings.quick else (256, 1024):
        found, details[f"speed at {length} tokens"] = _speed(model, length, settings)
        figures += found
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
        found, details[f"quality, {shape}"] = trim_quality.on_mixture(shape, settings)
        figures += found
    return Outcome(tuple(figures), details)


def ceilings(model: Any, trimmed: Trimmed, length: int) -> tuple[float, float]:
    """Largest possible ratios: FLOPs of a prompt, bytes of the weights that one new token reads."""
    base, config = plan_of(model), model.config
    # The input embedding is looked up, not multiplied; the head reads one position of a prompt.
    embedding = config.vocab_size * config.hidden_size
    head = embedding
    attention = 2 * length * length * config.hidden_size * config.num_hidden_layers

    def flops(active: int) -> float:
        return 2.0 * length * (active - 2 * embedding) + 2.0 * head + attention

    full = count_parameters(model, base).active
    cut = count_parameters(model, trimmed.plan, trimmed.hooks).active
    return flops(full) / flops(cut), (full - embedding) / (cut - embedding)


def _speed(model: Any, length: int, settings: Settings) -> tuple[list[Figure], dict[str, Any]]:
    """TTFT and ITL of one prompt length, both sides with the same way of running experts: ours, then transformers'."""
    layers = int(model.config.num_hidden_layers)
    hooks = new_hooks(model, allocate(default_units(model), dict.fromkeys(range(layers), 1.0)), "block", "parallel")
    trimmed = Trimmed(uniform(plan_of(model), 1), hooks, "kept_mass")
    generator = torch.Generator().manual_seed(settings.seed)
    prompt = torch.randint(3, model.config.vocab_size, (1, length), generator=generator)
    own = experts_way(model.config)

    def side(new: int, leaner: bool, compact: bool) -> Callable[[], None]:
        def work() -> None:
            with trimmed.attached(model) if leaner else nullcontext(), skipping(model) if compact else nullcontext():
                request(model, prompt, new)

        return work

    sides = {
        f"{name} {what} {experts}": side(new, name == "trimmed", experts == NAME)
        for experts in (NAME, own)
        for what, new in (("first", 1), ("all", NEW))
        for name in ("full", "trimmed")
    }
    # One request takes a fraction of a second, and this ratio is the first thing that people look at.
    seconds = in_turns(sides, 3 * settings.rounds)
    first, further = ceilings(model, trimmed, length)
    figures = []
    for experts, judged in ((NAME, True), (own, False)):
        between = {
            name: [
                (a - b) / (NEW - 1)
                for a, b in zip(seconds[f"{name} all {experts}"], seconds[f"{name} first {experts}"], strict=True)
            ]
            for name in ("full", "trimmed")
        }
        ttft = [1000 * statistics.median(seconds[f"{name} first {experts}"]) for name in ("full", "trimmed")]
        itl = [1000 * statistics.median(between[name]) for name in ("full", "trimmed")]
        figures += [
            Figure(
                f"TTFT, top-2 over top-1 with hooks, {length} tokens, {experts}",
                ratio(seconds, f"full first {experts}", f"trimmed first {experts}"),
                TTFT if judged else None,
                note=f"{ttft[0]:.0f} -> {ttft[1]:.0f} ms; FLOPs allow {first:.2f}x",
            ),
            Figure(
                f"ITL, top-2 over top-1 with hooks, {length} tokens, {experts}",
                itl[0] / itl[1],
                ITL if judged else None,
                note=f"{itl[0]:.1f} -> {itl[1]:.1f} ms; bytes allow {further:.2f}x",
            ),
        ]
    return figures, {
        "parameters": count_parameters(model, plan_of(model)).describe(),
        "trimmed": count_parameters(model, trimmed.plan, hooks).describe(),
        "ceilings": [first, further],
        "seconds": {name: [round(s, 5) for s in values] for name, values in seconds.items()},
    }


def _undone(model: Any, name: str = "93M shape") -> Figure:
    """Logits that differ after every plan of one layer was applied and undone."""
    ids = torch.arange(3, 35)[None]

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    before, changed = logits(), 0
    base = plan_of(model)
    for layer in range(len(base.ks)):
        with applied(model, base.with_k(layer, 1)):
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
        thresholds = ramp(rule, start, range(32), 0.2).values()
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
                "tlnle": plan.text(),
                "knapsack": own.plan.text(),
                "held_out": [drop(plan), own.drop],
                "test": [on_test(plan), on_test(own.plan)],
            }
        )
    worst = max(r["held_out"][1] - r["held_out"][0] for r in rows)
    on_test_worst = max(r["test"][1] - r["test"][0] for r in rows)
    best = max((r["held_out"][0] / max(r["held_out"][1], 1e-12), r["act"]) for r in rows)
    figure = Figure(
        "held-out KL of the knapsack's plans minus TLNLE's, worst Act",
        worst,
        0.0,
        "lower",
        " nats",
        4,
        f"test part {on_test_worst:+.4f}; at Act {best[1]:.2f} TLNLE's KL is {best[0]:.2f} times the knapsack's",
    )
    record = {
        "profile": [{"layer": n, "k": k, "drop": d} for (n, k), d in profile.items()],
        "pareto": [describe_point(p) for p in pareto(points)],
        "against_tlnle": rows,
    }
    return [figure], record


def _dynamic(bench: trim_quality.Bench) -> tuple[list[Figure], dict[str, Any]]:
    """Beside the plans: rules that choose k per token, tuned to Act 1.5 on training text, measured on the test part."""
    weights = router_weights(bench.model, bench.text.train.rows(range(min(32, len(bench.text.train)))))
    found = {}
    for rule in ("top_p", "rel_threshold"):
        with Dynamic(rule, tuned(rule, weights, 1.5)).applied(bench.model) as counts:
            quality = measure(bench.model, bench.text.test, bench.test_teacher)
        found[rule] = {"act": act_of(counts), **quality.describe()}
    drop = kl_drop(bench.model, bench.text.held_out, bench.material.held_out_teacher, rescale=bench.rescale)
    half = [Plan(ks) for ks in _half_plans(plan_of(bench.model))]
    plan = min(half, key=drop)
    with applied(bench.model, plan, bench.rescale):
        quality = measure(bench.model, bench.text.test, bench.test_teacher)
    found["plan"] = {"act": plan.act, "plan": plan.text(), **quality.describe()}
    kl = found["rel_threshold"]["kl"] / found["plan"]["kl"]
    note = f"relative threshold tuned to Act {found['rel_threshold']['act']:.2f}, plan {plan.text()}; both on the test part"
    return [Figure("KL of dynamic k over the best plan's at Act 1.5", kl, note=note)], found


def _half_plans(base: Plan) -> list[tuple[int | None, ...]]:
    """Every plan of a small model with Act 1.5."""
    plans: list[tuple[int | None, ...]] = [()]
    for full in base.ks:
        plans = [(*p, k) for p in plans for k in ([None] if full is None else range(1, full + 1))]
    return [p for p in plans if Plan(p).act == 1.5] or [base.with_k(0, 1).ks]
