"""The choice of a plan with its rule for router weights, on drops that are known."""

import pytest

from freemoe.core.errors import RecipeError
from freemoe.core.run.progress import QuietProgress
from freemoe.hookmoe.hooks.hook import allocate_units, new_hooks
from freemoe.hookmoe.measure import act_equivalent
from freemoe.hookmoe.plans.dynamic import router_renormalises
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.methods import (
    best_rule,
    default_units,
    describe_rules,
    find_plan,
    paper_units,
    rules_asked,
    units_of,
)
from freemoe.hookmoe.plans.plan import uniform_plan
from freemoe.hookmoe.recipe import HookSection, PlanSection
from tests.tiny import tiny_model


def drops_of(base, asked):
    """``kept_mass`` loses less where every layer runs one expert, ``none`` everywhere else; later layers lose less."""

    def drop(rule, plan):
        asked.append((rule, plan))
        own = sum((6 - n) * (b - k) for n, (k, b) in enumerate(zip(plan.ks, base.ks, strict=True)) if k and b)
        better = "kept_mass" if plan == uniform_plan(base, 1) else "none"
        return float(own) * (1.0 if rule == better else 1.5)

    return {rule: lambda plan, rule=rule: drop(rule, plan) for rule in ("none", "kept_mass")}


@pytest.mark.parametrize(("act", "rule"), [(1.0, "kept_mass"), (5 / 3, "none"), (4 / 3, "none")])
def test_the_rule_is_that_of_the_plan_which_is_taken(mixtral, act, rule):
    base = plan_of(mixtral)
    drops = drops_of(base, [])
    found = find_plan(mixtral, PlanSection(act=act), drops, QuietProgress())
    assert found.plan.act == pytest.approx(act)
    assert found.rescale == rule == found.record["chosen"]["rescale"]
    shown = describe_rules(drops, found)
    assert shown["rule"] == min(shown["held_out_kl"], key=shown["held_out_kl"].get)
    # Mixtral's own rule is renorm, so that it is not measured twice.
    assert shown["held_out_kl"]["renorm"] == shown["held_out_kl"]["none"]


def test_a_rule_that_is_asked_for_is_the_only_one_that_is_measured(mixtral):
    asked = []
    drops = drops_of(plan_of(mixtral), asked)
    found = find_plan(mixtral, PlanSection(act=1.0), {"none": drops["none"]}, QuietProgress())
    assert found.rescale == "none"
    assert {rule for rule, _ in asked} == {"none"}
    assert describe_rules({"none": drops["none"]}, found) == {"rule": "none", "held_out_kl": {}}


def test_rules_that_are_the_routers_own_are_not_measured_twice(mixture):
    assert rules_asked(mixture, "auto") == ("none", "kept_mass" if router_renormalises(mixture) else "renorm")
    assert rules_asked(mixture, "kept_mass") == ("kept_mass",)
    assert best_rule({"none": lambda p: 0.2, "renorm": lambda p: 0.2 - 1e-9}, plan_of(mixture))[0] == "none"


def test_swaps_are_bounded_and_in_the_record(mixtral):
    base = plan_of(mixtral)
    drops = drops_of(base, [])

    def turned(plan):
        # Measured as a whole the last layer is the sensitive one, and the profile says the first.
        cut = sum(k != b for k, b in zip(plan.ks, base.ks, strict=True))
        return drops["none"](plan) if cut < 2 else 100.0 * cut - 50.0 * (plan.ks[2] == 2)

    for most, best in ((24, (1, 1, 2)), (0, (2, 1, 1))):
        found = find_plan(mixtral, PlanSection(act=4 / 3, swaps=most, best=1), {"none": turned}, QuietProgress())
        assert found.plan.ks == best
        assert (found.record["swaps"]["measured"] > 0) == (most > 0)
    with pytest.raises(RecipeError, match="tolerance"):
        find_plan(mixtral, PlanSection(tolerance=1e-9), {"none": drops["none"]}, QuietProgress())


def test_hooks_cost_a_twelfth_of_the_work_that_a_plan_saves():
    for layers in (2, 6):
        model = tiny_model("mixtral", num_hidden_layers=layers)
        base = plan_of(model)
        for plan in (uniform_plan(base, 1), base.with_k(0, 1)):
            units = default_units(model, plan)
            hooks = new_hooks(model, allocate_units(units, dict.fromkeys(range(layers), 1.0)), "block", "parallel")
            saved = base.act - plan.act
            assert act_equivalent(model, hooks) == pytest.approx(saved / 12, rel=0.1)
        assert units_of(model, HookSection(layers="one"), plan) == paper_units(model) // 2
        assert units_of(model, HookSection(units=7), plan) == 7
