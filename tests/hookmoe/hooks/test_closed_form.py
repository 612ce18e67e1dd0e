"""Fits without gradients, against least squares and against what they must be exactly."""

import pytest
import torch

from freemoe.hookmoe.hooks.closed_form import fit_scale_bias, linear_map, ridge_start, sum_over_layers
from freemoe.hookmoe.hooks.hook import new_hooks
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.plan import LayerPlan, uniform_plan
from tests.hookmoe.conftest import blocks_of, logits

ONE = LayerPlan((1, 1, 1))


def test_a_map_of_full_rank_is_least_squares_and_of_low_rank_the_best_fit():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    r = x @ torch.randn(6, 6, generator=generator, dtype=torch.float64) + 0.1 * torch.randn(
        200, 6, generator=generator, dtype=torch.float64
    )
    exact = torch.linalg.lstsq(x, r).solution
    first, second = linear_map(x.T @ x, x.T @ r, 6, ridge=0.0)
    torch.testing.assert_close((second @ first).T, exact)
    # Reduced-rank regression: the fitted values of rank 2 are the truncated SVD of all fitted values.
    first, second = linear_map(x.T @ x, x.T @ r, 2, ridge=0.0)
    u, s, v = torch.linalg.svd(x @ exact, full_matrices=False)
    torch.testing.assert_close(x @ first.T @ second.T, u[:, :2] * s[:2] @ v[:2])


def test_a_walk_shows_both_outputs_of_the_same_input(mixture):
    before, base = logits(mixture), plan_of(mixture)
    seen = sum_over_layers(mixture, uniform_plan(base, 1), blocks_of(2), lambda *outputs: outputs)
    assert sorted(seen) == [n for n, k in enumerate(base.ks) if k is not None]
    for x, y, full in seen.values():
        assert x.shape == y.shape == full.shape == (48, 32)
        assert not torch.equal(y, full)
    assert torch.equal(logits(mixture), before)


@pytest.mark.parametrize("rescale", ["none", "kept_mass"])
def test_scale_and_bias_are_least_squares(mixtral, rescale):
    kept = sum_over_layers(mixtral, ONE, blocks_of(), lambda x, y, full: [y, full], rescale)
    fit = fit_scale_bias(mixtral, ONE, blocks_of(), rescale)
    for n, (y, full) in kept.items():
        own = ((fit.scales[n] * y + fit.biases[n] - full) ** 2).sum()
        assert own < ((y - full) ** 2).sum()
        for scale, bias in ((0.01, 0.0), (-0.01, 0.0), (0.0, 0.01)):
            assert ((((fit.scales[n] + scale) * y) + fit.biases[n] + bias - full) ** 2).sum() > own


def test_scale_and_bias_are_put_on_and_off(mixture):
    before = logits(mixture)
    plan = uniform_plan(plan_of(mixture), 1)
    fit = fit_scale_bias(mixture, plan, blocks_of())
    with apply_plan(mixture, plan):
        reduced = logits(mixture)
        with fit.attached(mixture):
            assert not torch.equal(logits(mixture), reduced)
    assert torch.equal(logits(mixture), before)


def test_the_started_hook_is_the_linear_map(mixtral):
    blocks = blocks_of()
    hooks = new_hooks(mixtral, {1: 64}, "block", "parallel")
    ridge_start(mixtral, LayerPlan((2, 1, 2)), hooks, blocks)
    ((x, y, full),) = sum_over_layers(mixtral, LayerPlan((2, 1, 2)), blocks, lambda *outputs: outputs).values()
    first, second = linear_map(x.double().T @ x.double(), x.double().T @ (full - y).double(), 32)
    x = torch.randn(5, 32)
    torch.testing.assert_close(
        hooks.items()[0][1].shift(x), (x.double() @ first.T @ second.T).float(), rtol=1e-3, atol=1e-5
    )


def test_a_hook_wider_than_the_map_holds_all_of_it_and_nothing_more(mixtral):
    plan = LayerPlan((2, 1, 2))
    exact, wide = (new_hooks(mixtral, {1: width}, "block", "parallel", seed=0) for width in (64, 100))
    for hooks in (exact, wide):
        ridge_start(mixtral, plan, hooks, blocks_of())
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    (one,), (other,) = ([hook for _, hook in hooks.items()] for hooks in (exact, wide))
    torch.testing.assert_close(one.shift(x), other.shift(x))
    assert torch.count_nonzero(other.down.weight[:, 64:]) == 0
