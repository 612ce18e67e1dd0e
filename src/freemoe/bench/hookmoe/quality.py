"""The part of `freemoe bench hookmoe` that trains: what hooks win back on the bundled mixture, next to their rivals.

Plan: one expert per layer instead of two. Hooks and LoRA have the same parameters (LoRA rounded up), text, loss, steps and
seed, and the rule for router weights that loses least; the paper's hook is given twice the parameters, as it asks for. The
step that is kept is settled on the held-out part, the figures are the test part's and the bundled benchmark's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freemoe.assets import DOMAINS
from freemoe.bench.harness import Settings
from freemoe.bench.hookmoe.rivals import LowRank
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.statistics import Interval
from freemoe.evals.tasks.documents import Document, FrozenChoice
from freemoe.evals.tasks.domains import load_domain
from freemoe.evals.tasks.task import Grader
from freemoe.hookmoe.adapter import Trimmed
from freemoe.hookmoe.hooks.closed_form import ScaleBias, fit_scale_bias, ridge_start
from freemoe.hookmoe.hooks.hook import allocate, new_hooks
from freemoe.hookmoe.hooks.teacher import Teacher, teach
from freemoe.hookmoe.hooks.training import Material, Schedule, train
from freemoe.hookmoe.material import DEMO, TextParts, load_text
from freemoe.hookmoe.measure import Quality, measure, recovered
from freemoe.hookmoe.plans.apply import applied, plan_of
from freemoe.hookmoe.plans.layers import moe_layers
from freemoe.hookmoe.plans.methods import default_units, find_rescale, kl_drop, paper_units
from freemoe.hookmoe.plans.plan import Plan, uniform
from freemoe.models.checkpoints.loading import BUNDLED_MOE, load_base
from freemoe.recipes import HookTraining, PlanSection, TrimRecipe

SEEDS = (0, 1, 2)
STEPS, ROWS, RATE, BLOCK, EVERY = 500, 8, 3e-3, 128, 100
PAPER_RATE = 1e-3
"""For hooks before the block: three times as much throws routing about, and nothing is won back."""


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
        rescale: The rule for router weights of least held-out KL under that plan.
    """

    model: Any
    text: TextParts
    material: Material
    test_teacher: Teacher
    scorer: Scorer
    plan: Plan
    rescale: str
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
    rescale, _ = find_rescale(
        model, PlanSection(), lambda rule: kl_drop(model, text.held_out, teachers[1], rescale=rule)
    )
    bench = Bench(
        model,
        text,
        Material(text.train, teachers[0], text.held_out, teachers[1]),
        teachers[2],
        Scorer(model, tokenizer),
        uniform(plan_of(model), 1),
        rescale,
    )
    for domain in DOMAINS:
        data = load_domain(domain, [f"demo:{domain}"], tokenizer=tokenizer, limit=20 if quick else None)
        bench.documents[domain] = list(data.reported.open(FrozenChoice("bench hookmoe")))
        bench.graders[domain] = data.graders
    return bench


@dataclass(frozen=True, eq=False)
class Row:
    """One rival on the test part and on the benchmark.

    Attributes:
        quality: On text, per block.
        wrong: (documents,) 1 for a wrong answer, over its domain's documents and the number of domains: the sum is one minus
            the mean accuracy of the domains.
        parameters: Trained ones.
    """

    quality: Quality
    wrong: Tensor
    parameters: int = 0

    @property
    def accuracy(self) -> float:
        """Mean over the benchmark's domains of the share of right answers."""
        return 1 - float(self.wrong.sum())

    def losses(self, what: str) -> Tensor:
        """Per block ``ce`` or ``kl``, or per document ``accuracy``, as something to lose."""
        return self.wrong if what == "accuracy" else getattr(self.quality, what)

    def describe(self) -> dict[str, float]:
        """As JSON."""
        return {**self.quality.describe(), "accuracy": self.accuracy, "parameters": self.parameters}


def look(bench: Bench, context: AbstractContextManager[Any], parameters: int = 0) -> Row:
    """Measure the model as a context leaves it."""
    wrong = []
    with context:
        quality = measure(bench.model, bench.text.test, bench.test_teacher)
        for domain, documents in bench.documents.items():
            scores = Evaluator(bench.scorer, bench.graders[domain]).score(documents)
            right = torch.tensor([score.value for score in scores], dtype=torch.float64)
            wrong.append((1 - right) / len(right) / len(bench.documents))
    return Row(quality, torch.cat(wrong), parameters)


def free_rows(bench: Bench) -> dict[str, Row]:
    """What needs no training: full model, plan under the model's own rule, compensators."""
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


def residual_of(bench: Bench, rescale: str) -> dict[int, float]:
    """What the held-out KL falls by when one layer goes back to full k: it places hooks."""
    drop = kl_drop(bench.model, bench.text.held_out, bench.material.held_out_teacher, rescale=rescale)
    base, whole = plan_of(bench.model), drop(bench.plan)
    return {
        layer.number: whole - drop(bench.plan.with_k(layer.number, base.ks[layer.number] or 1))
        for layer in moe_layers(bench.model)
    }


def trained_rows(bench: Bench, residuals: dict[str, dict[int, float]], seed: int, settings: Settings) -> dict[str, Row]:
    """Hooks and their rivals, trained with one seed, where `residual_of` each rule for router weights places them."""
    model, plan, rows = bench.model, bench.plan, {}
    steps = 4 if settings.quick else STEPS
    residual, papers = residuals[bench.rescale], residuals["none"]
    units = default_units(model)
    several, one = allocate(units, residual), {max(residual, key=lambda n: residual[n]): units}
    whole = {max(papers, key=lambda n: papers[n]): paper_units(model)}

    def work(
        name: str, widths: dict[int, int], loss: str = "kd", position: str = "parallel", to: Plan | None = None
    ) -> None:
        own = to or plan
        rescale = bench.rescale if position == "parallel" and own is plan else "none"
        hooks = new_hooks(model, widths, "block", position, seed=seed)
        trimmed = Trimmed(own, hooks, rescale)
        if position == "parallel" and own is plan:
            ridge_start(model, plan, hooks, bench.text.train, rescale)
            if name == "several hooks":
                rows["several hooks, closed form alone"] = look(bench, trimmed.attached(model), hooks.size)
        rate = RATE if position == "parallel" else PAPER_RATE
        schedule = Schedule(loss, steps, ROWS, rate, EVERY, seed)
        train(
            model,
            own,
            hooks,
            bench.material,
            schedule,
            rescale=rescale,
            progress=settings.progress,
            name=f"{name}, seed {seed}",
        )
        rows[name] = look(bench, trimmed.attached(model), hooks.size)

    work("one hook", one)
    work("several hooks", several)
    work("several hooks, lm", several, "lm")
    work("control: full k, lm", several, "lm", to=plan_of(model))
    work("the paper's hook, kd", whole, position="pre")
    work("the paper's hook, lm", whole, "lm", position="pre")
    lora = LowRank(model, new_hooks(model, several, "block", "parallel").size, seed)
    schedule = Schedule("kd", steps, ROWS, RATE, EVERY, seed)
    name = f"LoRA, seed {seed}"
    train(model, plan, lora, bench.material, schedule, rescale=bench.rescale, progress=settings.progress, name=name)
    with applied(model, plan, bench.rescale):
        rows["LoRA"] = look(bench, lora.attached(model), sum(p.numel() for p in lora.parameters()))
    return rows


def share(full: Row, plan: Row, seeds: Sequence[Row], what: str, control: bool = False) -> tuple[Interval, list[float]]:
    """Share of what the plan lost that is won back, in per cent: mean over seeds with its 95 % interval, and each seed's.

    The interval is over blocks of text, or documents; the control's gain is counted from the full model.
    """
    top, bottom = full.losses(what), plan.losses(what)
    now = [row.losses(what) for row in seeds]
    each = [100 * float(((top if control else bottom) - n).sum() / (bottom - top).sum()) for n in now]
    return recovered(top, bottom, torch.stack(now).mean(0), control=control).scaled(100), each
