"""Dynamic k: the rules against what their formulas say, and real skipping against weights of zero."""

import pytest
import torch

from freemoe.core.errors import RecipeError
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.compact import use_compact_experts
from freemoe.hookmoe.plans.dynamic import (
    RULES,
    act_of,
    apply_rule,
    kept_slots,
    naee_thresholds,
    ramp_thresholds,
    router_weights,
    threshold_for,
    tune_thresholds,
)
from freemoe.hookmoe.plans.layers import moe_layers, plan_of
from freemoe.hookmoe.plans.plan import uniform_plan
from tests.hookmoe.conftest import blocks_of, logits


def uniform_q(tokens=200_000, seed=0):
    """(tokens, 2) router weights whose ratio w2 / w1 is uniform on [0, 1], the two in random order."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(tokens, generator=generator, dtype=torch.float64)
    weights = torch.stack([1 / (1 + q), q / (1 + q)], dim=1)
    swap = torch.rand(tokens, generator=generator) < 0.5
    return torch.where(swap[:, None], weights.flip(1), weights)


def act(rule, weights, threshold):
    return float(kept_slots(rule, weights, threshold).sum() / len(weights))


@pytest.mark.parametrize(
    ("rule", "threshold", "wanted"),
    [*(("top_p", p, 3 - 1 / p) for p in (0.52, 0.6, 0.7)), *(("rel_threshold", t, 2 - t) for t in (0.5, 0.6, 0.9))],
)
def test_the_act_of_a_threshold_on_uniform_ratios(rule, threshold, wanted):
    assert act(rule, uniform_q(), threshold) == pytest.approx(wanted, abs=0.01)


def test_naees_median_gives_act_one_and_a_half():
    weights = {0: uniform_q(seed=1), 3: uniform_q(seed=2) ** 2}
    for layer, beta in naee_thresholds(weights).items():
        assert act("naee", weights[layer], beta) == pytest.approx(1.5, abs=0.01)


def test_the_papers_ramps():
    down, up = ramp_thresholds("top_p", 0.7, range(32), 0.2), ramp_thresholds("rel_threshold", 0.5, range(32), 0.2)
    assert (down[31], up[31]) == (pytest.approx(0.50625), pytest.approx(0.69375))
    q = uniform_q()
    mean = sum(act("top_p", q, p) for p in down.values()) / 32
    assert mean == pytest.approx(1.327, abs=0.01)
    mean = sum(act("rel_threshold", q, t) for t in up.values()) / 32
    assert mean == pytest.approx(1.403, abs=0.01)


def test_at_two_experts_top_p_is_a_relative_threshold():
    weights = uniform_q(1000)
    for tau in (0.3, 0.8):
        assert torch.equal(kept_slots("top_p", weights, 1 / (1 + tau)), kept_slots("rel_threshold", weights, tau))


def test_slots_need_not_be_sorted_and_the_heaviest_stays():
    weights = torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.25, 0.35]])
    assert kept_slots("top_p", weights, 0.65).tolist() == [[False, True, True], [True, False, True]]
    assert kept_slots("top_p", weights, 0.0).tolist() == [[False, True, False], [True, False, False]]
    assert kept_slots("rel_threshold", weights, 0.5).tolist() == [[False, True, True], [True, True, True]]
    assert kept_slots("rel_threshold", weights, 9.0).sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("target", [1.0, 1.3, 2.5, 4.0])
def test_thresholds_hit_a_target_act(rule, target):
    weights = torch.rand(5000, 4, generator=torch.Generator().manual_seed(3))
    assert act(rule, weights, threshold_for(rule, weights, target)) == pytest.approx(target, abs=0.01)


def test_an_act_that_k_experts_cannot_give_is_refused():
    with pytest.raises(RecipeError, match="can give 1 to 2"):
        threshold_for("top_p", uniform_q(10), 2.5)
    with pytest.raises(RecipeError, match="known: top_p"):
        kept_slots("top_q", uniform_q(10), 0.5)


def test_compact_experts_are_the_models_own(mixture):
    before, own = logits(mixture), mixture.config._experts_implementation
    with use_compact_experts(mixture):
        torch.testing.assert_close(logits(mixture), before, rtol=1e-4, atol=1e-5)
    assert mixture.config._experts_implementation == own
    assert torch.equal(logits(mixture), before)


@pytest.mark.parametrize("rule", RULES)
def test_skipping_equals_weights_of_zero(mixture, rule):
    before = logits(mixture)
    blocks = blocks_of()
    thresholds = tune_thresholds(rule, router_weights(mixture, blocks), 1.5)
    with apply_rule(mixture, rule, thresholds, skip=False):
        slow = logits(mixture, blocks.ids)
    with apply_rule(mixture, rule, thresholds, skip=True) as counts:
        quick = logits(mixture, blocks.ids)
    torch.testing.assert_close(quick, slow, rtol=1e-5, atol=1e-5)
    # Lower layers change what upper ones see, so the target is only about met.
    assert act_of(counts) == pytest.approx(1.5, abs=0.15)
    assert torch.equal(logits(mixture), before)


def test_skipped_slots_are_never_computed(mixtral):
    rows = []
    for layer in moe_layers(mixtral):
        own = layer.experts._apply_gate
        layer.experts._apply_gate = lambda x, own=own: rows.append(len(x)) or own(x)
    with apply_rule(mixtral, "rel_threshold", dict.fromkeys(range(3), 2.0)):
        logits(mixtral)
    assert sum(rows) == 24 * 3


def test_gradients_pass_through_compact_experts(mixtral):
    grads = []
    for quick in (False, True):
        mixtral.zero_grad()
        with use_compact_experts(mixtral) if quick else torch.enable_grad():
            mixtral(input_ids=torch.arange(3, 20)[None], use_cache=False).logits.square().mean().backward()
        grads.append([p.grad.clone() for p in mixtral.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("skip", [True, False])
def test_a_rule_over_a_corrected_gate_runs_the_experts_that_the_gate_chose_first(corrected, skip):
    before = logits(corrected)
    # Of the largest weight alone nothing but one slot is kept: one expert per token, as the gate has it at k = 1.
    with apply_plan(corrected, uniform_plan(plan_of(corrected), 1), "renorm"):
        own = logits(corrected)
    thresholds = {layer.number: 1.0 for layer in moe_layers(corrected)}
    with apply_rule(corrected, "rel_threshold", thresholds, skip) as counts:
        torch.testing.assert_close(logits(corrected), own, rtol=1e-4, atol=1e-5)
    assert act_of(counts) == 1.0
    assert torch.equal(logits(corrected), before)
