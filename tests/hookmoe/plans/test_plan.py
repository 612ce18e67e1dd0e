"""Plans as data: the paper's schedules, what is read and written, what is refused."""

import pytest

from freemoe.core.errors import RecipeError
from freemoe.hookmoe.plans.plan import LayerPlan, expert_n, parse_plan, tlnle, uniform_plan

BASE = LayerPlan((2,) * 32)


def test_tlnle_2_2_on_mixtral_is_the_papers_act():
    plan = tlnle(BASE, 2, 2)
    assert plan.ks == (2, 2, *(1,) * 30)
    assert plan.act == 34 / 32  # Tab. 5: 1.06


def test_tlnle_is_expert_n_to_the_last_layer_and_its_ends_are_uniform():
    assert tlnle(BASE, 2, 5) == expert_n(BASE, 2, 5, 31)
    assert tlnle(BASE, 2, 32) == BASE
    assert tlnle(BASE, 2, 0) == uniform_plan(BASE, 1)


def test_expert_n_cuts_both_ends_included():
    assert expert_n(LayerPlan((4,) * 6), 4, 1, 3).ks == (4, 3, 3, 3, 4, 4)


def test_dense_layers_stay_dense_and_do_not_count():
    base = LayerPlan((None, 6, 6))
    assert uniform_plan(base, 3).ks == (None, 3, 3)
    assert uniform_plan(base, 3).act == 3.0
    assert tlnle(base, 4, 2).ks == (None, 4, 3)


@pytest.mark.parametrize("text", ["2,2,1,1", "uniform:1", "tlnle:2,3", "expert_n:2,1,2", "-,1,2,1"])
def test_a_plan_is_read_back_from_its_text(text):
    base = LayerPlan((None, 2, 2, 2)) if text.startswith("-") else LayerPlan((2,) * 4)
    counts = [None if k is None else 8 for k in base.ks]
    plan = parse_plan(text, base, counts)
    assert parse_plan(plan.to_text(), base, counts) == plan


def test_uniform_is_told_from_per_layer():
    assert LayerPlan((None, 1, 1)).uniform_k == 1
    assert LayerPlan((2, 1)).uniform_k is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("9,1,1,1", r"9 experts in layer 0.*router has 8; allowed: 1 to 8"),
        ("uniform:0", r"0 experts in layer 0"),
        ("tlnle:1,0", r"0 experts"),
        ("1,1", r"2 entries.*4 decoder layers"),
        ("1,1,1,-", r"Layer 3 is a mixture"),
        ("tnlne:2,2", r"cannot be read; write uniform:K"),
        ("tlnle:2", r"cannot be read"),
        ("two", r"cannot be read"),
        ("expert_n:2,3,9", r"Layers 3\.\.9 do not fit a model of 4 layers"),
        ("tlnle:2,5", r"do not fit"),
    ],
)
def test_what_a_model_cannot_run_is_refused(text, says):
    with pytest.raises(RecipeError, match=says):
        parse_plan(text, LayerPlan((2,) * 4), [8] * 4)


def test_a_number_for_a_dense_layer_is_refused():
    with pytest.raises(RecipeError, match=r"Layer 0 is dense.*dense layers are \[0\]"):
        parse_plan("1,1", LayerPlan((None, 2)), [None, 8])
