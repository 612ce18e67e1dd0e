"""From a recipe to one plan, and to where its hooks stand: the searches of `search`, run on a model and journalled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freemoe.core.errors import RecipeError
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.progress import Progress
from freemoe.core.run.unit_state import NO_CHECKPOINT
from freemoe.evals.speed import prompt_lengths
from freemoe.hookmoe.hooks.hook import allocate_units
from freemoe.hookmoe.hooks.teacher import TeacherLogits
from freemoe.hookmoe.measure import measure_quality
from freemoe.hookmoe.plans.apply import RESCALES, apply_plan
from freemoe.hookmoe.plans.dynamic import RULES, router_renormalises
from freemoe.hookmoe.plans.layers import moe_layers, plan_of, read_plan
from freemoe.hookmoe.plans.perturbation import perturbation_profile
from freemoe.hookmoe.plans.plan import LayerPlan, uniform_plan
from freemoe.hookmoe.plans.search import (
    Drop,
    MeasuredPlan,
    Profile,
    candidate_plans,
    choose_plan,
    even_plan,
    local_swaps,
    pareto_front,
    profile_units,
    two_stage,
)
from freemoe.hookmoe.recipe import HookSection, PlanSection, TrimRecipe
from freemoe.text.blocks import PackedBlocks


@dataclass(frozen=True)
class PlanResult:
    """A plan, and how it was come by."""

    plan: LayerPlan  # The plan
    rescale: str  # The rule for router weights under which it loses least, of those that were asked for
    star: int | None  # The layer where the paper's search wants its one hook; None for other ways
    record: dict[str, Any]  # For `result.json`: profile, Pareto list, what was asked


Measure = Callable[[Sequence[tuple[str, LayerPlan]]], None]
"""Lets others measure plans, each under a rule, and write them into the journal, before they are asked for here."""


def drop_unit(rescale: str, plan: LayerPlan) -> str:
    """The journal's name for what a plan loses under a rule."""
    return f"drop|{rescale}|{plan.to_text()}"


def kl_drop(
    model: Any, blocks: PackedBlocks, teacher: TeacherLogits, run: RunFolder | None = None, rescale: str = "none"
) -> Drop:
    """Held-out KL of a plan from the full model, in nats per token; measured, and written down, once per plan."""
    known: dict[LayerPlan, float] = {}

    def measure_drop(plan: LayerPlan) -> float:
        unit = drop_unit(rescale, plan)

        def compute_kl() -> float:
            with apply_plan(model, plan, rescale):
                return measure_quality(model, blocks, teacher, run.unit_state(unit) if run else NO_CHECKPOINT).mean_kl

        if plan not in known:
            known[plan] = run.run_unit(unit, compute_kl) if run else compute_kl()
        return known[plan]

    return measure_drop


Drops = Mapping[str, Drop]
"""Rule for router weights -> the drop of plans under it."""


def rules_asked(model: Any, rescale: str) -> tuple[str, ...]:
    """The rules for router weights to be measured: the one that is asked for, or for ``auto`` those that differ.

    A router that renormalises its k weights has ``renorm`` for its own rule, any other ``kept_mass``.
    """
    if rescale != "auto":
        return (rescale,)
    return ("none", "kept_mass" if router_renormalises(model) else "renorm")


def best_rule(drops: Drops, plan: LayerPlan) -> tuple[str, float]:
    """The rule under which a plan loses least, and that drop; the first of those that are equal but for rounding."""
    found = {rule: drop(plan) for rule, drop in drops.items()}
    rule = min(found, key=lambda name: round(found[name], 6))
    return rule, found[rule]


def _rule_of(drops: Drops, plan: LayerPlan) -> str:
    """The best rule; where only one is asked for, nothing is measured."""
    return next(iter(drops)) if len(drops) == 1 else best_rule(drops, plan)[0]


def describe_rules(drops: Drops, plan_result: PlanResult) -> dict[str, Any]:
    """For `result.json`: the chosen rule, and what the plan loses under every one (empty where none was to be chosen)."""
    if len(drops) == 1:
        return {"rule": plan_result.rescale, "held_out_kl": {}}
    losses = {rule: drop(plan_result.plan) for rule, drop in drops.items()}
    # The rule that is missing is the router's own.
    return {"rule": plan_result.rescale, "held_out_kl": {rule: losses.get(rule, losses["none"]) for rule in RESCALES}}


def check_asked(model: Any, recipe: TrimRecipe) -> None:
    """Raise where a model cannot do what a recipe asks for by name: a dense model, a wrong plan, a hook without a mixture.

    Raises:
        FamilyError: The model is dense.
        RecipeError: The plan does not fit or cuts nothing; a hook's layer is dense or absent.
    """
    layers = moe_layers(model)
    if recipe.plan.given is not None:
        given_plan(model, recipe.plan.given)
    elif all(layer.k == 1 for layer in layers):
        raise RecipeError("The model runs 1 expert per token already: there is nothing to cut.")
    prompt_lengths(recipe.timing, model, recipe.training.block)
    if isinstance(recipe.hooks.layers, tuple):
        mixtures = [layer.number for layer in layers]
        wrong = [n for n in recipe.hooks.layers if n not in mixtures]
        if wrong:
            raise RecipeError(f"hooks.layers names {wrong}, which are dense or absent; mixture layers: {mixtures}.")


def given_plan(model: Any, text: str) -> LayerPlan:
    """The plan that a recipe spells out.

    Raises:
        RecipeError: A plan that the model cannot run, that runs more than the model does, or that cuts nothing.
    """
    base = plan_of(model)
    if text.partition(":")[0] in RULES:
        raise RecipeError(
            f"{text!r} chooses experts per token: no artefact holds such a rule. Measure it beside a plan: --compare {text!r}."
        )
    plan = read_plan(text, model)
    above = [i for i, (k, b) in enumerate(zip(plan.ks, base.ks, strict=True)) if k and b and k > b]
    if above:
        raise RecipeError(
            f"The plan {plan.to_text()} runs more experts than the model does in layers {above}; its own are {base.to_text()}."
        )
    if plan == base:
        raise RecipeError(f"The plan {plan.to_text()} is the model's own: it cuts nothing.")
    return plan


def find_plan(
    model: Any, section: PlanSection, drops: Drops, progress: Progress, seed: int = 0, ahead: Measure | None = None
) -> PlanResult:
    """The plan that a recipe asks for, with its rule for router weights.

    Each plan is held against others under its own best rule; ``ahead`` measures plans side by side, where there is somebody
    to do so.

    Raises:
        RecipeError: A plan that the model cannot run, that cuts nothing, or an Act that no plan has.
    """
    base = plan_of(model)
    if section.given is not None:
        plan = given_plan(model, section.given)
        return PlanResult(plan, _rule_of(drops, plan), None, {"by": "given"})
    if section.search == "two_stage":
        found = two_stage(base, lambda plan: best_rule(drops, plan)[1], section.tolerance)
        mixed = [layer.number for layer in moe_layers(model)]
        star = min((n for n in mixed if n >= found.layer), default=mixed[-1])
        asked = [{"plan": p.to_text(), "drop": d} for p, d in found.measured]
        record = {"by": "two_stage", "k_star": found.k, "l_star": found.layer, "asked": asked}
        return PlanResult(found.deployed, _rule_of(drops, found.deployed), star, record)
    points, profile = pareto_list(model, section, drops, progress, seed, ahead)
    first = choose_plan(pareto_front(points), section.act, section.tolerance)
    if first.plan == base:
        raise RecipeError(
            f"No plan that runs fewer experts stays within the tolerance of {section.tolerance:g} nats; raise plan.tolerance, or "
            "give an Act."
        )
    swaps = local_swaps(base, first, profile, drops[first.rescale], section.swaps)
    front = pareto_front([*points, *swaps])
    chosen = choose_plan(front, section.act, section.tolerance)
    record = {
        "by": "knapsack",
        "score": section.score,
        "profile": [{"layer": n, "k": k, "drop": d} for (n, k), d in profile.items()],
        "points": [describe_point(p) for p in [*points, *swaps]],
        "pareto": [describe_point(p) for p in front],
        "chosen": describe_point(chosen),
        "swaps": {"measured": len(swaps), "before": describe_point(first)},
    }
    return PlanResult(chosen.plan, _rule_of(drops, chosen.plan), None, record)


def pareto_list(
    model: Any, section: PlanSection, drops: Drops, progress: Progress, seed: int = 0, ahead: Measure | None = None
) -> tuple[list[MeasuredPlan], Profile]:
    """Profile every layer and k, then measure the plans that look best for every Act with all layers cut together.

    Single layers are profiled under the rule that loses least on an even plan of the Act that is asked for; whole plans are
    measured under every rule, for which rule is best depends on how much is cut.
    """
    base = plan_of(model)
    if section.score == "perturbation":
        profile: Profile = perturbation_profile(model, seed)
    else:
        units = profile_units(base)
        rule = _rule_of(drops, even_plan(base, section.act or (1 + base.act) / 2))
        if ahead is not None:
            ahead([(rule, base.with_k(layer, k)) for layer, k in units])
        with progress.stage("profile", len(units)) as advance:
            profile = {}
            for layer, k in units:
                profile[layer, k] = drops[rule](base.with_k(layer, k))
                advance(1)
    asked = candidate_plans(base, profile, section.best, section.act)
    points = []
    if ahead is not None:
        ahead([(rule, plan) for plan, _, _ in asked for rule in drops])
    with progress.stage("plans", len(asked)) as advance:
        for plan, predicted, source in asked:
            rule, lost = best_rule(drops, plan)
            points.append(MeasuredPlan(plan, lost, predicted, source, rule))
            advance(1)
    return points, profile


def describe_point(point: MeasuredPlan) -> dict[str, Any]:
    """As JSON, which knows no NaN."""
    predicted = None if point.predicted != point.predicted else point.predicted
    return {
        "plan": point.plan.to_text(),
        "act": point.plan.act,
        "drop": point.drop,
        "predicted": predicted,
        "source": point.source,
        "rescale": point.rescale,
    }


def hook_widths(
    model: Any, section: HookSection, plan_result: PlanResult, drop: Drop
) -> tuple[dict[int, int], dict[int, float]]:
    """Where hooks stand and how wide they are, and the residual KL that decided it.

    A layer's residual is what the held-out KL falls by when that layer alone goes back to full k.
    """
    if section.layers == "none":
        return {}, {}
    base = plan_of(model)
    if isinstance(section.layers, tuple):
        wanted = list(section.layers)
    else:
        wanted = [
            layer.number for layer in moe_layers(model) if plan_result.plan.ks[layer.number] != base.ks[layer.number]
        ]
    units = units_of(model, section, plan_result.plan)
    if section.layers == "one" and plan_result.star is not None:
        return {plan_result.star: units}, {}
    whole = drop(plan_result.plan)
    residual = {n: whole - drop(plan_result.plan.with_k(n, base.ks[n] or 1)) for n in wanted}
    if section.layers == "one":
        return {max(residual, key=lambda n: (residual[n], -n)): units}, residual
    return allocate_units(units, residual), residual


def paper_units(model: Any) -> int:
    """Hidden units of the paper's one hook: an expert's width, twice that for fine-grained experts."""
    layer = moe_layers(model)[0]
    # Fine-grained experts are narrower than the residual stream; the paper's coarse ones are several times wider.
    return layer.width if layer.width >= layer.hidden or layer.count <= 8 else 2 * layer.width


def default_units(model: Any, plan: LayerPlan | None = None) -> int:
    """Hidden units of all hooks of a plan: a twelfth of the work that it saves, so that they grow with depth and with the cut.

    An expert of width f has 3 h f weights, a hook of d units 2 h d: a twelfth of one expert is f / 8 units. Over four
    layers that go from two experts to one this is half an expert's width, with which hooks beside the blocks won back more
    than the paper's one hook of a whole width (docs/hookmoe.md). Without a plan it is one expert everywhere.
    """
    base = plan_of(model)
    plan = plan or uniform_plan(base, 1)
    saved = sum((b or 0) - (k or 0) for b, k in zip(base.ks, plan.ks, strict=True))
    return max(1, round(moe_layers(model)[0].width * saved / 8))


def units_of(model: Any, section: HookSection, plan: LayerPlan) -> int:
    """Hidden units that hooks have together: as asked for, half of the paper's for one hook, else `default_units`."""
    if section.units is not None:
        return section.units
    return max(1, paper_units(model) // 2) if section.layers == "one" else default_units(model, plan)
