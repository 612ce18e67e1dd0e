"""From a recipe to one plan, and to where its hooks stand: the searches of `search`, run on a model and journalled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from freemoe.core.errors import RecipeError
from freemoe.core.run.journal import Journal
from freemoe.core.run.progress import Progress
from freemoe.hookmoe.hooks.hook import allocate
from freemoe.hookmoe.hooks.teacher import Teacher
from freemoe.hookmoe.measure import measure
from freemoe.hookmoe.plans.apply import RESCALES, applied, expert_counts, plan_of
from freemoe.hookmoe.plans.layers import moe_layers
from freemoe.hookmoe.plans.perturbation import perturbation_profile
from freemoe.hookmoe.plans.plan import Plan, parse_plan, uniform
from freemoe.hookmoe.plans.search import Drop, Point, candidates, choose, pareto, profile_units, two_stage
from freemoe.recipes import HookSection, PlanSection, TrimRecipe
from freemoe.text.blocks import Blocks


@dataclass(frozen=True)
class Found:
    """A plan, and how it was come by.

    Attributes:
        plan: The plan.
        star: The layer where the paper's search wants its one hook; None for other ways.
        record: For `result.json`: profile, Pareto list, what was asked.
    """

    plan: Plan
    star: int | None
    record: dict[str, Any]


def kl_drop(
    model: Any, blocks: Blocks, teacher: Teacher, journal: Journal | None = None, rescale: str = "none"
) -> Drop:
    """Held-out KL of a plan from the full model, in nats per token; measured, and written down, once per plan."""
    known: dict[Plan, float] = {}

    def drop(plan: Plan) -> float:
        def work() -> float:
            with applied(model, plan, rescale):
                return measure(model, blocks, teacher).mean_kl

        if plan not in known:
            known[plan] = journal.unit(f"drop|{rescale}|{plan.text()}", work) if journal else work()
        return known[plan]

    return drop


def find_rescale(model: Any, section: PlanSection, drop_under: Callable[[str], Drop]) -> tuple[str, dict[str, float]]:
    """The rule for router weights that a recipe asks for; for ``auto`` the one of least held-out KL.

    It is settled before the plan, on the plan that is given or else on one expert per layer, where rules differ most.

    Args:
        model: A mixture model.
        section: What is asked for.
        drop_under: From a rule to the drop of plans under it.

    Returns:
        The rule, and what each one lost (empty where nothing was measured).
    """
    if section.rescale != "auto":
        return section.rescale, {}
    plan = given_plan(model, section.given) if section.given is not None else uniform(plan_of(model), 1)
    # Two of the three are the same rule where a router always, or never, normalises: rounding keeps the first of equals.
    found = {rule: round(drop_under(rule)(plan), 6) for rule in RESCALES}
    return min(found, key=lambda rule: found[rule]), found


def check_asked(model: Any, recipe: TrimRecipe) -> None:
    """Raise where a model cannot do what a recipe asks for by name: a dense model, a wrong plan, a hook without a mixture.

    Raises:
        FamilyError: The model is dense.
        RecipeError: The plan does not fit or cuts nothing; a hook's layer is dense or absent.
    """
    layers = [layer.number for layer in moe_layers(model)]
    if recipe.plan.given is not None:
        given_plan(model, recipe.plan.given)
    elif all(k in (None, 1) for k in plan_of(model).ks):
        raise RecipeError("The model runs 1 expert per token already: there is nothing to cut.")
    if isinstance(recipe.hooks.layers, tuple):
        wrong = [n for n in recipe.hooks.layers if n not in layers]
        if wrong:
            raise RecipeError(f"hooks.layers names {wrong}, which are dense or absent; mixture layers: {layers}.")


def given_plan(model: Any, text: str) -> Plan:
    """The plan that a recipe spells out.

    Raises:
        RecipeError: A plan that the model cannot run, that runs more than the model does, or that cuts nothing.
    """
    base = plan_of(model)
    plan = parse_plan(text, base, expert_counts(model))
    above = [i for i, (k, b) in enumerate(zip(plan.ks, base.ks, strict=True)) if k and b and k > b]
    if above:
        raise RecipeError(
            f"The plan {plan.text()} runs more experts than the model does in layers {above}; its own are {base.text()}."
        )
    if plan == base:
        raise RecipeError(f"The plan {plan.text()} is the model's own: it cuts nothing.")
    return plan


def find_plan(model: Any, section: PlanSection, drop: Drop, progress: Progress, seed: int = 0) -> Found:
    """The plan that a recipe asks for.

    Raises:
        RecipeError: A plan that the model cannot run, that cuts nothing, or an Act that no plan has.
    """
    base = plan_of(model)
    if section.given is not None:
        return Found(given_plan(model, section.given), None, {"by": "given"})
    if section.search == "two_stage":
        found = two_stage(base, drop, section.tolerance)
        mixed = [layer.number for layer in moe_layers(model)]
        star = min((n for n in mixed if n >= found.layer), default=mixed[-1])
        asked = [{"plan": p.text(), "drop": d} for p, d in found.asked]
        return Found(
            found.deployed, star, {"by": "two_stage", "k_star": found.k, "l_star": found.layer, "asked": asked}
        )
    points, profile = pareto_list(model, section, drop, progress, seed)
    front = pareto(points)
    chosen = choose(front, section.act, section.tolerance)
    if chosen.plan == base:
        raise RecipeError(
            f"No plan that runs fewer experts stays within the tolerance of {section.tolerance:g} nats; raise plan.tolerance, or "
            "give an Act."
        )
    record = {
        "by": "knapsack",
        "score": section.score,
        "profile": [{"layer": n, "k": k, "drop": d} for (n, k), d in profile.items()],
        "points": [describe_point(p) for p in points],
        "pareto": [describe_point(p) for p in front],
        "chosen": describe_point(chosen),
    }
    return Found(chosen.plan, None, record)


def pareto_list(
    model: Any, section: PlanSection, drop: Drop, progress: Progress, seed: int = 0
) -> tuple[list[Point], dict[tuple[int, int], float]]:
    """Profile every layer and k, then measure the plans that look best for every Act with all layers cut together."""
    base = plan_of(model)
    if section.score == "perturbation":
        profile = perturbation_profile(model, seed)
    else:
        units = profile_units(base)
        profile = {}
        with progress.stage("profile", len(units)) as advance:
            for layer, k in units:
                profile[layer, k] = drop(base.with_k(layer, k))
                advance(1)
    asked = candidates(base, profile, section.best, section.act)
    points = []
    with progress.stage("plans", len(asked)) as advance:
        for plan, predicted, source in asked:
            points.append(Point(plan, drop(plan), predicted, source))
            advance(1)
    return points, profile


def describe_point(point: Point) -> dict[str, Any]:
    """As JSON, which knows no NaN."""
    predicted = None if point.predicted != point.predicted else point.predicted
    return {
        "plan": point.plan.text(),
        "act": point.plan.act,
        "drop": point.drop,
        "predicted": predicted,
        "source": point.source,
    }


def hook_widths(model: Any, section: HookSection, found: Found, drop: Drop) -> tuple[dict[int, int], dict[int, float]]:
    """Where hooks stand and how wide they are, and the residual KL that decided it.

    A layer's residual is what the held-out KL falls by when that layer alone goes back to full k.
    """
    if section.layers == "none":
        return {}, {}
    base = plan_of(model)
    if isinstance(section.layers, tuple):
        wanted = list(section.layers)
    else:
        wanted = [layer.number for layer in moe_layers(model) if found.plan.ks[layer.number] != base.ks[layer.number]]
    units = section.units or default_units(model)
    if section.layers == "one" and found.star is not None:
        return {found.star: units}, {}
    whole = drop(found.plan)
    residual = {n: whole - drop(found.plan.with_k(n, base.ks[n] or 1)) for n in wanted}
    if section.layers == "one":
        return {max(residual, key=lambda n: (residual[n], -n)): units}, residual
    return allocate(units, residual), residual


def paper_units(model: Any) -> int:
    """Hidden units of the paper's one hook: an expert's width, twice that for fine-grained experts."""
    layer = moe_layers(model)[0]
    # Fine-grained experts are narrower than the residual stream; the paper's coarse ones are several times wider.
    return layer.width if layer.width >= layer.hidden or layer.count <= 8 else 2 * layer.width


def default_units(model: Any) -> int:
    """Half of the paper's: hooks beside the blocks win back more with half than its hook with all (docs/hookmoe.md)."""
    return max(1, paper_units(model) // 2)
