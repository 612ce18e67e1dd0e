"""SparseGPT against the slow, obvious version: one explicit inverse for every column."""

import pytest
import torch

from benchmarks.rivals.fits.sparsegpt import _prune_layers, prune, pruned
from freemoe.core.errors import NumericError
from tests.benchmarks.rivals.tiny_terms import TERMS, given


def slow(weight, hessian, share, block, damping):
    """Settle column after column; the rest of the row makes up for it by the inverse over the columns not yet settled."""
    h = hessian.double() + damping * hessian.diagonal().double().mean() * torch.eye(len(hessian), dtype=torch.float64)
    w = weight.double().clone()
    for start in range(0, w.shape[1], block):
        columns = list(range(start, min(start + block, w.shape[1])))
        cost = torch.stack([w[:, j] ** 2 / torch.linalg.inv(h[j:, j:])[0, 0] for j in columns], 1)
        off = cost <= cost.flatten().sort().values[round(share * cost.numel()) - 1]
        for j in columns:
            inverse = torch.linalg.inv(h[j:, j:])
            for row in range(len(w)):
                if off[row, j - start]:
                    w[row, j:] -= w[row, j] / inverse[0, 0] * inverse[0]
    return w


@pytest.mark.parametrize(("block", "share"), [(4, 0.5), (6, 0.25), (12, 0.5)])
def test_it_is_the_slow_version(block, share):
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(5, 12, generator=generator), torch.randn(40, 12, generator=generator)
    x[:, 3] += x[:, 7]  # columns that can make up for each other
    hessian = x.T @ x / len(x)
    fast = prune(weight, hessian, share, block=block)
    expected = slow(weight, hessian, share, block, 0.01)
    torch.testing.assert_close(fast.double(), expected, atol=1e-4, rtol=1e-4)
    assert int((fast == 0).sum()) == 12 // block * round(share * 5 * block)
    # The others make up for it: better than setting the same ones to zero.
    plain = weight * (fast != 0)
    error, without = (float(((w - weight) @ hessian @ (w - weight).T).trace()) for w in (fast, plain))
    assert error < without


def test_without_correlation_it_is_magnitude_times_norm():
    weight = torch.tensor([[1.0, -0.5, 0.2, 0.9], [0.1, 2.0, -0.3, 0.4]])
    norms = torch.tensor([1.0, 1.0, 10.0, 0.1])
    fast = prune(weight, torch.diag(norms**2), 0.5, block=4, damping=0.0)
    lowest = (weight * norms).abs().flatten().argsort()[:4]
    expected = weight.flatten().index_fill(0, lowest, 0.0).view_as(weight)
    assert torch.equal(fast, expected)


def test_inputs_that_never_come_cost_nothing_and_a_broken_hessian_is_named():
    weight = torch.ones(2, 3)
    hessian = torch.diag(torch.tensor([1.0, 0.0, 1.0]))
    fast = prune(weight, hessian, 0.34)
    assert fast[:, 1].tolist() == [0.0, 0.0]
    assert fast[:, 0].tolist() == fast[:, 2].tolist() == [1.0, 1.0]
    with pytest.raises(NumericError, match="not positive definite"):
        prune(weight, -hessian, 0.5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mixtral", "gpt_oss"])
def test_a_layer_is_pruned_on_what_the_pruned_ones_before_it_give(family):
    model, materials = given(family)
    second = [w for w in materials.weights if w.layer == 1]
    before = [w.canonical_view().clone() for w in second]
    with pruned(model, materials, TERMS) as fitted:
        assert fitted.share_off == pytest.approx(0.25, abs=0.02)
        inside = [w.canonical_view().clone() for w in second]
    assert all(torch.equal(a, w.canonical_view()) for a, w in zip(before, second, strict=True))
    # Pruned on the inputs of the whole model instead, the second layer comes out otherwise.
    with torch.no_grad():
        _prune_layers(model, second, materials.batches(materials.gradient), 0.25)
    assert any(not torch.equal(a, w.canonical_view()) for a, w in zip(inside, second, strict=True))
