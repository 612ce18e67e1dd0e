"""The part of `python -m benchmarks hookmoe` that trains: what hooks win back of loss, KL and accuracy, next to their rivals.

On the bundled mixture, and on mixtures of other shapes that were trained on real text (`mixtures`). Plan: half of the experts
in every layer. Hooks and LoRA have the same parameters (LoRA rounded up), text, loss, steps and
seed, and the rule for router weights that loses least; the paper's hook is given twice the parameters, as it asks for. The
step that is kept is settled on the held-out part, the figures are the test part's and the bundled benchmark's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Figure, Settings, not_measured
from benchmarks.hookmoe import mixtures
from benchmarks.hookmoe.records import Records, Row, records_of
from freemoe.assets import BUNDLED_MOE, DOMAINS
from freemoe.evals.engine.evaluator import Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.statistics import Interval
from freemoe.evals.tasks.documents import Document, FrozenChoice
from freemoe.evals.tasks.domains import load_domain
from freemoe.evals.tasks.task import TaskGrader
from freemoe.hookmoe.adapter import Trimmed
from freemoe.hookmoe.hooks.closed_form import fit_scale_bias, ridge_start
from freemoe.hookmoe.hooks.hook import allocate_units, new_hooks
from freemoe.hookmoe.hooks.teacher import TeacherLogits, compute_teacher_logits
from freemoe.hookmoe.hooks.training import TrainingData, TrainingSchedule, train_compensation
from freemoe.hookmoe.material import DEMO, TextParts, load_text
from freemoe.hookmoe.measure import measure_quality, recovered_share
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.layers import moe_layers, plan_of
from freemoe.hookmoe.plans.methods import best_rule, default_units, kl_drop, paper_units, rules_asked
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.hookmoe.plans.search import even_plan
from freemoe.hookmoe.recipe import HookTraining, TrimRecipe
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.hooks import combined_hooks, forward_hook
from freemoe.models.weights import find_weights
from freemoe.recipes import DataSection

SEEDS = (0, 1, 2)
STEPS, ROWS, EVERY = 500, 8, 100
SIZES = {"block": 128, "limit": 1536, "held_out": 64, "test": 384}
MIXTURE_STEPS = 250
RATE, PAPER_RATE = 0.3, 0.1
"""Over the hidden size; for hooks before the block three times as much throws routing about, and nothing is won back."""
RECOVERED, LEAST = 60.0, 49.0
"""Per cent of what was lost: the mean, and the lower end of its interval."""
JUDGED = ("one hook", "several hooks")


class LowRank(nn.Module):
    """The rival of hooks: W x + B A x for every attention linear, of the least rank with so many parameters; B begins at zero."""

    lowest = 0

    def __init__(self, model: Any, parameters: int, seed: int) -> None:
        super().__init__()
        weights = [w for w in find_weights(model) if w.sublayer == "attention" and isinstance(w.module, nn.Linear)]
        self.paths = [w.name.removesuffix(".weight") for w in weights]
        sizes = [(w.num_columns, w.num_rows) for w in weights]
        self.rank = -(-parameters // sum(i + o for i, o in sizes))
        generator = torch.Generator().manual_seed(seed)
        self.a = nn.ParameterList(torch.randn(self.rank, i, generator=generator) * i**-0.5 for i, _ in sizes)
        self.b = nn.ParameterList(torch.zeros(o, self.rank) for _, o in sizes)

    def attached(self, model: Any) -> AbstractContextManager[Any]:
        """While open, the linears have their low-rank partner."""

        def beside(a: Tensor, b: Tensor) -> Any:
            return lambda module, args, output: output + (args[0] @ a.T) @ b.T

        pairs = zip(self.paths, self.a, self.b, strict=True)
        return combined_hooks(*(forward_hook(model.get_submodule(path), beside(a, b)) for path, a, b in pairs))


@dataclass
class Bench:
    """A mixture with everything that its rivals share."""

    model: Any  # The mixture, fp32
    text: TextParts  # Its three parts
    material: TrainingData  # What training reads
    test_teacher: TeacherLogits  # What the full model says on the test part
    scorer: Scorer  # Scores them
    plan: LayerPlan  # Half of the experts in every layer
    rescale: str  # The rule for router weights of least held-out KL under that plan
    records: Records  # The rows that are measured already
    # The bundled benchmark's reported documents, by domain; none of another mixture, whose accuracy is that of the next
    # token
    documents: dict[str, list[Document]] = field(default_factory=dict)
    graders: dict[str, dict[str, TaskGrader]] = field(default_factory=dict)  # Theirs


def prepare(settings: Settings, model_name: str = BUNDLED_MOE, text_name: str = DEMO) -> Bench:
    """Load a mixture and its text, and the bundled one's benchmark; run the full model over the text."""
    quick = settings.quick
    sizes = {"block": 64, "limit": 16, "held_out": 4, "test": 8} if quick else SIZES
    training = HookTraining.model_validate(sizes)
    recipe = TrimRecipe(model=model_name, text=text_name, training=training)
    model, tokenizer = load_base(model_name, dtype="float32", device="cpu")
    text = load_text(recipe, tokenizer)
    teachers = [
        compute_teacher_logits(model, part, training.top, progress=settings.progress)
        for part in (text.train, text.held_out, text.test)
    ]
    plan = even_plan(plan_of(model), plan_of(model).act / 2)
    drops = {r: kl_drop(model, text.held_out, teachers[1], rescale=r) for r in rules_asked(model, "auto")}
    rescale = best_rule(drops, plan)[0]
    decided = [quick, training.model_dump(mode="json"), plan.to_text(), rescale, ROWS, EVERY, RATE, PAPER_RATE]
    records = records_of(settings.cells or settings.cache / "hookmoe-cells", model_name, text, decided)
    material = TrainingData(text.train, teachers[0], text.held_out, teachers[1])
    bench = Bench(model, text, material, teachers[2], Scorer(model, tokenizer), plan, rescale, records)
    for domain in DOMAINS if model_name == BUNDLED_MOE else ():
        data = load_domain(domain, [f"demo:{domain}"], DataSection(limit=20 if quick else None), tokenizer=tokenizer)
        bench.documents[domain] = list(data.reported.open(FrozenChoice("bench hookmoe")))
        bench.graders[domain] = data.graders
    return bench


def look(bench: Bench, context: AbstractContextManager[Any], parameters: int = 0) -> Row:
    """Measure the model as a context leaves it."""
    wrong = []
    with context:
        quality = measure_quality(bench.model, bench.text.test, bench.test_teacher)
        for domain, documents in bench.documents.items():
            scores = Evaluator(bench.scorer, bench.graders[domain]).score(documents)
            right = torch.tensor([score.value for score in scores], dtype=torch.float64)
            wrong.append((1 - right) / len(right) / len(bench.documents))
    if not wrong:
        wrong.append((quality.tokens - quality.right) / quality.tokens.sum())
    return Row(quality, torch.cat(wrong), parameters)


def free_rows(bench: Bench) -> dict[str, Row]:
    """What needs no training: full model, plan under the model's own rule, compensators."""
    model, plan = bench.model, bench.plan
    fit = fit_scale_bias(model, plan, bench.text.train.select_rows(range(min(64, len(bench.text.train)))))
    rows = {"full": look(bench, contextlib.nullcontext()), "plan": look(bench, apply_plan(model, plan))}
    with apply_plan(model, plan):
        rows["scale and bias"] = look(bench, fit.attached(model))
    # The rule that is not the router's own.
    other = rules_asked(model, "auto")[1]
    rows[OTHER_RULE[other]] = look(bench, apply_plan(model, plan, other))
    return rows


OTHER_RULE = {"kept_mass": "kept mass", "renorm": "renormalised"}
"""How a rule for router weights is called in the table."""


def residual_of(bench: Bench, rescale: str) -> dict[int, float]:
    """What the held-out KL falls by when one layer goes back to full k: it places hooks."""
    drop = kl_drop(bench.model, bench.text.held_out, bench.material.held_out_teacher, rescale=rescale)
    base, whole = plan_of(bench.model), drop(bench.plan)
    return {
        layer.number: whole - drop(bench.plan.with_k(layer.number, base.ks[layer.number] or 1))
        for layer in moe_layers(bench.model)
    }


@dataclass(frozen=True, eq=False)
class Training:
    """What every rival of one seed is trained with."""

    bench: Bench
    settings: Settings
    steps: int
    seed: int

    def fit(self, name: str, trained: Any, plan: LayerPlan, loss: str, rescale: str, rate: float = RATE) -> None:
        """Train hooks, or LoRA, on the mixture under a plan."""
        bench = self.bench
        rate /= moe_layers(bench.model)[0].hidden
        asked = TrainingSchedule(loss, self.steps, ROWS, rate, EVERY, self.seed)
        more = {"rescale": rescale, "progress": self.settings.progress, "name": f"{name}, seed {self.seed}"}
        train_compensation(bench.model, plan, trained, bench.material, asked, **more)

    def hooks(
        self,
        name: str,
        widths: dict[int, int],
        loss: str = "kd",
        position: str = "parallel",
        to: LayerPlan | None = None,
    ) -> Row:
        """Hooks of these widths; those beside the blocks of the trimmed mixture begin in closed form, ``loss`` "": and end so."""
        bench, plan = self.bench, to or self.bench.plan
        ridge = position == "parallel" and plan is bench.plan
        rescale = bench.rescale if ridge else "none"

        def measured() -> Row:
            hooks = new_hooks(bench.model, widths, "block", position, seed=self.seed)
            if ridge:
                ridge_start(bench.model, plan, hooks, bench.text.train, rescale)
            if loss:
                self.fit(name, hooks, plan, loss, rescale, RATE if position == "parallel" else PAPER_RATE)
            return look(bench, Trimmed(plan, hooks, rescale).attached(bench.model), hooks.num_parameters)

        return bench.records.row(f"{name}, {self.steps} steps", self.seed, measured)

    def lora(self, size: int) -> Row:
        """LoRA of at least so many numbers."""
        bench = self.bench

        def measured() -> Row:
            lora = LowRank(bench.model, size, self.seed)
            self.fit("LoRA", lora, bench.plan, "kd", bench.rescale)
            with apply_plan(bench.model, bench.plan, bench.rescale):
                return look(bench, lora.attached(bench.model), sum(p.numel() for p in lora.parameters()))

        return bench.records.row(f"LoRA, {self.steps} steps", self.seed, measured)


def trained_rows(
    bench: Bench, residuals: dict[str, dict[int, float]], seed: int, settings: Settings, papers: bool = True
) -> dict[str, Row]:
    """Hooks and their rivals, trained with one seed, where `residual_of` each rule for router weights places them.

    ``papers``: also the paper's own hook and losses on the text, which the bundled mixture alone is worth.
    """
    model = bench.model
    training = Training(bench, settings, 4 if settings.quick else STEPS if papers else MIXTURE_STEPS, seed)
    residual, theirs = residuals[bench.rescale], residuals["none"]
    units = default_units(model, bench.plan)
    several, one = allocate_units(units, residual), {max(residual, key=lambda n: residual[n]): units}
    asked: list[tuple[Any, ...]] = [
        ("one hook", one),
        ("several hooks, closed form alone", several, ""),
        ("several hooks", several),
        ("control: full k, lm", several, "lm", "parallel", plan_of(model)),
    ]
    if papers:
        whole = {max(theirs, key=lambda n: theirs[n]): paper_units(model)}
        asked += [
            ("several hooks, lm", several, "lm"),
            ("the paper's hook, kd", whole, "kd", "pre"),
            ("the paper's hook, lm", whole, "lm", "pre"),
        ]
    rows = {found[0]: training.hooks(*found) for found in asked}
    return rows | {"LoRA": training.lora(new_hooks(model, several, "block", "parallel").num_parameters)}


def run(bench: Bench, settings: Settings, name: str = "") -> tuple[list[Figure], dict[str, Any]]:
    """Train every rival with every seed on one mixture, and say what each wins back; ``name``: of one that is not bundled."""
    free = free_rows(bench)
    full, plan = free["full"], free["plan"]
    seeds = SEEDS[: 1 if settings.quick else 3]
    residual = {rule: residual_of(bench, rule) for rule in {"none": 0, bench.rescale: 0}}
    by_seed = {s: trained_rows(bench, residual, s, settings, papers=not name) for s in seeds}
    rows = {row: [found[row] for found in by_seed.values()] for row in by_seed[seeds[0]]}
    rows |= {row: [free[row]] for row in free if row not in ("full", "plan")}
    figures: list[Figure] = []
    shares: dict[str, dict[str, Any]] = {row: {} for row in rows}
    for what, title in (("ce", "lost loss"), ("kl", "KL"), ("accuracy", "lost accuracy")):
        lost = float((plan.losses(what) - full.losses(what)).sum())
        lost = 100 * lost if what == "accuracy" else lost / float(plan.quality.tokens.sum())
        for row, found in rows.items():
            control = row.startswith("control")
            if control and what == "kl":
                continue
            won, each = share(full, plan, found, what, control)
            shares[row][what] = {"interval": list(won.as_json().values()), "seeds": each}
            note = f"[{won.low:.0f}, {won.high:.0f}]"
            if len(each) > 1:
                note += f", seeds {', '.join(f'{v:.0f}' for v in each)}"
            if found[0].parameters:
                note += f"; {found[0].parameters:,} parameters"
            if row in JUDGED:
                note += f"; lost: {lost:.3g} {'points' if what == 'accuracy' else 'nats'}"
            shown = f"{row}, {name}" if name else row
            target = RECOVERED if row in JUDGED else None
            figures.append(Figure(f"{title} won back: {shown}", won.mean, target, "higher", " %", 0, note))
            if row in JUDGED:
                figures.append(Figure(f"{title} won back, lower end: {shown}", won.low, LEAST, "higher", " %", 0))
    return figures, {
        "plan": bench.plan.to_text(),
        "base": plan_of(bench.model).to_text(),
        "rescale": bench.rescale,
        "shares": shares,
        "free": {n: r.describe() for n, r in free.items()},
        "trained": {s: {n: r.describe() for n, r in found.items()} for s, found in by_seed.items()},
        "residual_kl": residual[bench.rescale],
    }


def on_mixture(shape: str, settings: Settings) -> tuple[list[Figure], dict[str, Any]]:
    """The same on a mixture of another shape: one that is kept in the cache folder, else one that is trained now.

    Without either, because there is no text to train on, the figure says so.
    """
    folder = mixtures.best_kept(settings.cache, shape, settings.quick)
    if folder is None and settings.data_root is not None:
        settings.progress.say(f"training a mixture of {shape}'s shape; kept in {settings.cache}")
        steps = mixtures.QUICK_STEPS if settings.quick else mixtures.STEPS
        folder = mixtures.folder_of(settings.cache, shape, steps=steps, quick=settings.quick)
        mixtures.make_mixture(folder, settings.data_root, shape, steps=steps, quick=settings.quick)
    if folder is None:
        note = "needs real text to train the mixture on: --data-root FOLDER"
        return [not_measured(f"lost loss won back: several hooks, {shape}", RECOVERED, " %", note)], {}
    bench = prepare(settings, str(folder / "model"), str(folder / "unseen.jsonl"))
    figures, details = run(bench, settings, shape)
    return figures, {**details, "mixture": mixtures.kept(folder)}


def share(full: Row, plan: Row, seeds: Sequence[Row], what: str, control: bool = False) -> tuple[Interval, list[float]]:
    """Share of what the plan lost that is won back, in per cent: mean over seeds with its 95 % interval, and each seed's.

    The interval is over blocks of text, or documents; the control's gain is counted from the full model.
    """
    top, bottom = full.losses(what), plan.losses(what)
    now = [row.losses(what) for row in seeds]
    each = [100 * float(((top if control else bottom) - n).sum() / (bottom - top).sum()) for n in now]
    return recovered_share(top, bottom, torch.stack(now).mean(0), start=top if control else None).scaled(100), each
