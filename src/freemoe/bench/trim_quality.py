"""The part of `freemoe bench hookmoe` that trains: what hooks win back on the bundled mixture, next to their rivals.

Plan: one expert per layer instead of two. Every rival has the same parameters (LoRA rounded up), text, loss, steps and seed;
the step that is kept is settled on the held-out part, the figures are the test part's and the bundled benchmark's.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from freemoe.assets import DOMAINS
from freemoe.bench.harness import Settings
from freemoe.bench.trim_rivals import LowRank
from freemoe.evals.documents import Document, FrozenChoice
from freemoe.evals.domains import load_domain
from freemoe.evals.scorer import Scorer
from freemoe.evals.tasks import Grader
from freemoe.families.loading import BUNDLED_MOE, load_base
from freemoe.hookmoe.adapter import Trimmed
from freemoe.hookmoe.applied import applied, plan_of
from freemoe.hookmoe.closed_form import ScaleBias, fit_scale_bias, ridge_start
from freemoe.hookmoe.evaluation import score_documents
from freemoe.hookmoe.hook import allocate, new_hooks
from freemoe.hookmoe.layers import moe_layers
from freemoe.hookmoe.material import DEMO, TextParts, load_text
from freemoe.hookmoe.measure import Quality, measure
from freemoe.hookmoe.planning import default_units, kl_drop
from freemoe.hookmoe.plans import Plan, uniform
from freemoe.hookmoe.teacher import Teacher, teach
from freemoe.hookmoe.training import Material, Schedule, train
from freemoe.recipes import HookTraining, TrimRecipe

SEEDS = (0, 1, 2)
STEPS, ROWS, RATE, BLOCK, EVERY = 300, 8, 3e-3, 128, 100
DOCUMENTS = 600


@dataclass
class Bench:
    """The bundled mixture with everything that its rivals share.

    Attributes:
        model: The mixture, fp32.
        text: Its three parts.
        material: What training reads.
        test_teacher: What the full model says on the test part.
        documents: The bundled benchmark's reported documents, by domain.
        graders: Theirs.
        scorer: Scores them.
        plan: One expert per layer.
    """

    model: Any
    text: TextParts
    material: Material
    test_teacher: Teacher
    scorer: Scorer
    plan: Plan
    documents: dict[str, list[Document]] = field(default_factory=dict)
    graders: dict[str, dict[str, Grader]] = field(default_factory=dict)


def prepare(settings: Settings) -> Bench:
    """Load the bundled mixture, its text and its benchmark; run the full model over the text."""
    quick = settings.quick
    training = HookTraining(
        block=64 if quick else BLOCK,
        limit=16 if quick else 1536,
        held_out=4 if quick else 64,
        test=8 if quick else 384,
    )
    recipe = TrimRecipe(model=BUNDLED_MOE, text=DEMO, training=training)
    model, tokenizer = load_base(BUNDLED_MOE, dtype="float32", device="cpu")
    text = load_text(recipe, tokenizer)
    teachers = [
        teach(model, part, training.top, progress=settings.progress) for part in (text.train, text.held_out, text.test)
    ]
    bench = Bench(
        model,
        text,
        Material(text.train, teachers[0], text.held_out, teachers[1]),
        teachers[2],
        Scorer(model, tokenizer),
        uniform(plan_of(model), 1),
    )
    for domain in DOMAINS:
        data = load_domain(domain, [f"demo:{domain}"], tokenizer=tokenizer, limit=20 if quick else DOCUMENTS)
        bench.documents[domain] = list(data.reported.open(FrozenChoice("bench hookmoe")))
        bench.graders[domain] = data.graders
    return bench


@dataclass(frozen=True)
class Row:
    """One rival on the test part and on the benchmark.

    Attributes:
        ce, kl: Nats per token.
        accuracy: Mean over the benchmark's domains of the share of right answers.
        parameters: Trained ones.
    """

    ce: float
    kl: float
    accuracy: float
    parameters: int = 0


def look(bench: Bench, context: AbstractContextManager[Any], parameters: int = 0) -> Row:
    """Measure the model as a context leaves it."""
    with context:
        found: Quality = measure(bench.model, bench.text.test, bench.test_teacher)
        scores = [
            statistics.fmean(score_documents(bench.scorer, bench.graders[d], documents))
            for d, documents in bench.documents.items()
        ]
    return Row(found.mean_ce, found.mean_kl, statistics.fmean(scores), parameters)


def free_rows(bench: Bench) -> dict[str, Row]:
    """What needs no training: full model, plan alone, compensators."""
    model, plan = bench.model, bench.plan
    fit = fit_scale_bias(model, plan, bench.text.train.rows(range(min(64, len(bench.text.train)))))
    return {
        "full": look(bench, contextlib.nullcontext()),
        "plan": look(bench, applied(model, plan)),
        "kept mass": look(bench, applied(model, plan, "kept_mass")),
        "scale and bias": look(bench, _fitted(bench, fit)),
    }


@contextlib.contextmanager
def _fitted(bench: Bench, fit: ScaleBias) -> Iterator[None]:
    with applied(bench.model, bench.plan), fit.attached(bench.model):
        yield


def widths_of(bench: Bench) -> tuple[dict[int, int], dict[int, int], dict[int, float]]:
    """Widths of one hook and of several under the same budget, and the residual KL that placed them."""
    drop = kl_drop(bench.model, bench.text.held_out, bench.material.held_out_teacher)
    base, whole = plan_of(bench.model), drop(bench.plan)
    residual = {
        layer.number: whole - drop(bench.plan.with_k(layer.number, base.ks[layer.number] or 1))
        for layer in moe_layers(bench.model)
    }
    units = default_units(bench.model)
    return {max(residual, key=lambda n: residual[n]): units}, allocate(units, residual), residual


def trained_rows(bench: Bench, seed: int, settings: Settings) -> dict[str, Row]:
    """Hooks and their rivals, trained with one seed."""
    one, several, _ = widths_of(bench)
    model, plan = bench.model, bench.plan
    steps = 4 if settings.quick else STEPS
    rows: dict[str, Row] = {}

    def work(name: str, widths: dict[int, int], loss: str = "kd", position: str = "pre", full: bool = False) -> None:
        hooks = new_hooks(model, widths, "block", position, seed=seed)
        if position == "parallel":
            ridge_start(model, plan, hooks, bench.text.train)
            rows[f"{name}, ridge start alone"] = look(bench, Trimmed(plan, hooks).attached(model), hooks.size)
        own = plan_of(model) if full else plan
        schedule = Schedule(loss, steps, ROWS, RATE, EVERY, seed)
        train(model, own, hooks, bench.material, schedule, progress=settings.progress, name=f"{name}, seed {seed}")
        rows[name] = look(bench, Trimmed(own, hooks).attached(model), hooks.size)

    work("one hook", one)
    work("several hooks", several)
    work("several hooks, parallel", several, position="parallel")
    work("several hooks, lm", several, "lm")
    work("control: full k, lm", several, "lm", full=True)
    lora = LowRank(model, new_hooks(model, several, "block", "pre").size, seed)
    schedule = Schedule("kd", steps, ROWS, RATE, EVERY, seed)
    train(model, plan, lora, bench.material, schedule, progress=settings.progress, name=f"LoRA, seed {seed}")
    with applied(model, plan):
        rows["LoRA"] = look(bench, lora.attached(model), sum(p.numel() for p in lora.parameters()))
    return rows


def share(full: float, plan: float, now: float, control: bool = False) -> float:
    """Share of what the plan lost that is won back; the control's gain is counted from the full model."""
    return ((full if control else plan) - now) / (plan - full)
