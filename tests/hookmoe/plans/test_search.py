"""Searches over plans against brute force, on drops that are known."""

import itertools
import random

import pytest

from freemoe.core.errors import RecipeError
from freemoe.hookmoe.plans.plan import LayerPlan, tlnle, uniform_plan
from freemoe.hookmoe.plans.search import (
    MeasuredPlan,
    candidate_plans,
    choose_plan,
    even_plan,
    local_swaps,
    neighbour_plans,
    pareto_front,
    profile_units,
    solve_knapsack,
    two_stage,
)

BASE = LayerPlan((None, 3, 2, 3))


def random_profile(seed):
    draw = random.Random(seed)
    return {unit: draw.random() for unit in profile_units(BASE)}


def test_a_profile_asks_for_every_layer_and_k_below_its_own():
    assert profile_units(BASE) == [(1, 1), (1, 2), (2, 1), (3, 1), (3, 2)]


@pytest.mark.parametrize("seed", range(4))
def test_the_knapsack_is_the_brute_force(seed):
    profile = random_profile(seed)
    rows = {}
    for ks in itertools.product(range(1, 4), range(1, 3), range(1, 4)):
        cost = sum(0.0 if k == b else profile[n, k] for n, k, b in zip((1, 2, 3), ks, (3, 2, 3), strict=True))
        rows.setdefault(sum(ks), []).append(cost)
    found = solve_knapsack(BASE, profile, best=3)
    assert sorted(found) == sorted(rows)
    for pairs, costs in rows.items():
        assert [d for d, _ in found[pairs]] == pytest.approx(sorted(costs)[:3])
        assert all(sum(k or 0 for k in plan.ks) == pairs and plan.ks[0] is None for _, plan in found[pairs])


def test_candidates_hold_the_knapsacks_and_the_papers_plans():
    asked = {plan: source for plan, _, source in candidate_plans(BASE, random_profile(0))}
    assert asked[BASE] == "full"
    assert uniform_plan(BASE, 1) in asked
    assert "tlnle" in asked.values()
    # None of them runs more experts than the model does.
    assert all(k is None or k <= b for plan in asked for k, b in zip(plan.ks, BASE.ks, strict=True))


def test_the_pareto_list_has_no_beaten_plan():
    points = [
        MeasuredPlan(LayerPlan((1, 1)), 5.0, 0, "knapsack"),
        MeasuredPlan(LayerPlan((2, 1)), 6.0, 0, "knapsack"),
        MeasuredPlan(LayerPlan((1, 2)), 2.0, 0, "tlnle"),
        MeasuredPlan(LayerPlan((2, 2)), 0.0, 0, "full"),
    ]
    front = pareto_front(points)
    assert [p.plan.ks for p in front] == [(2, 2), (1, 2), (1, 1)]
    assert choose_plan(front, 1.5, 0.1).plan.ks == (1, 2)
    assert choose_plan(front, None, 2.5).plan.ks == (1, 2)
    assert choose_plan(front, None, 0.01).plan.ks == (2, 2)
    with pytest.raises(RecipeError, match="below the least that any plan has: 1"):
        choose_plan(front, 0.5, 0.1)


def test_the_two_stage_search_walks_as_the_paper_does():
    base = LayerPlan((4,) * 8)

    def drop(plan):
        # Every expert taken away costs 1, in layers below 3 ten times as much.
        return float(sum((4 - (k or 0)) * (10 if n < 3 else 1) for n, k in enumerate(plan.ks)))

    found = two_stage(base, drop, tolerance=40)
    # uniform 3 drops 35, uniform 2 drops 70: k* = 3; TLNLE(3, l) drops 35 + 5 at l = 3 and more below.
    assert (found.k, found.layer) == (3, 3)
    assert found.deployed == uniform_plan(base, 2)
    assert len(found.measured) <= 2 + 4
    assert found.measured[0] == (uniform_plan(base, 3), 35.0)


def test_without_a_tolerable_layer_the_star_is_beyond_the_last():
    found = two_stage(LayerPlan((2, 2)), lambda plan: 0.0 if plan == LayerPlan((2, 2)) else 9.0, 1.0)
    assert (found.k, found.layer) == (2, 2)
    assert tlnle(LayerPlan((2, 2)), 2, 2) == LayerPlan((2, 2))


def test_a_model_of_one_expert_per_token_has_nothing_to_cut():
    with pytest.raises(RecipeError, match="nothing to cut"):
        two_stage(LayerPlan((1, 1)), lambda plan: 0.0, 1.0)


def test_an_even_plan_spends_its_act_and_no_more():
    assert even_plan(BASE, 2.0) == LayerPlan((None, 2, 2, 2))
    assert even_plan(BASE, 2.6) == LayerPlan((None, 3, 2, 2))
    assert even_plan(BASE, 9.0) == BASE
    assert even_plan(BASE, 1.0) == uniform_plan(BASE, 1)


def test_neighbours_move_one_expert_and_come_in_the_order_that_the_profile_promises():
    profile = random_profile(1)
    start = LayerPlan((None, 2, 1, 3))
    found = neighbour_plans(BASE, start, profile)
    # Layer 2 has nothing to give, layer 3 takes nothing.
    assert {plan for _, plan in found} == {
        LayerPlan((None, 1, 2, 3)),
        LayerPlan((None, 3, 1, 2)),
        LayerPlan((None, 2, 2, 2)),
    }
    for predicted, plan in found:
        own = sum(profile[n, k] for n, k in enumerate(plan.ks) if k is not None and k != BASE.ks[n])
        assert predicted == pytest.approx(own)
    assert [p for p, _ in found] == sorted(p for p, _ in found)


def test_swaps_find_a_plan_that_no_sum_of_layers_shows():
    base = LayerPlan((2,) * 6)
    profile = {unit: 1.0 + 0.01 * unit[0] for unit in profile_units(base)}
    hidden = LayerPlan((2, 1, 2, 1, 2, 1))
    asked = []

    def drop(plan):
        # How far from the best plan: layers make up for each other, which a profile of single layers cannot see.
        asked.append(plan)
        return 0.5 * sum(a != b for a, b in zip(plan.ks, hidden.ks, strict=True))

    start = MeasuredPlan(LayerPlan((1, 1, 1, 2, 2, 2)), drop(LayerPlan((1, 1, 1, 2, 2, 2))), 0.0, "knapsack", "renorm")
    asked.clear()
    found = local_swaps(base, start, profile, drop, 100)
    assert min(found, key=lambda p: p.drop).plan == hidden
    assert len(set(asked)) == len(asked) == len(found)
    assert {p.plan.act for p in found} == {1.5}
    assert {(p.source, p.rescale) for p in found} == {("swap", "renorm")}
    assert len(local_swaps(base, start, profile, drop, 3)) == 3
    assert local_swaps(base, start, profile, drop, 0) == []
