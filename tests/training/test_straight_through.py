"""Hard choices: exactly zeros and ones forward, the stated gradient backward, the stated law of keeping."""

import math

import pytest
import torch

from freemoe.training.straight_through import (
    MEDIAN_NOISE,
    gumbel_noise,
    gumbel_sigmoid,
    gumbel_softmax,
    hard_top_k,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_sigmoid_is_hard_forward_and_soft_backward():
    x = torch.linspace(-6, 2, 33, requires_grad=True)
    kept = gumbel_sigmoid(x, 3.0, 0.4, None)
    assert set(kept.tolist()) <= {0.0, 1.0}
    assert torch.equal(kept, (x + 3 + MEDIAN_NOISE > 0).float())
    weights = torch.rand(33, generator=generator())
    (kept * weights).sum().backward()
    y = torch.sigmoid((x.detach() + 3 + MEDIAN_NOISE) / 0.4)
    torch.testing.assert_close(x.grad, weights * y * (1 - y) / 0.4)


@pytest.mark.parametrize("x", [0.0, -3.0, -3.37, -5.0])
def test_the_law_of_keeping(x):
    logits = torch.full((40000,), x)
    kept = gumbel_sigmoid(logits, 3.0, 0.4, generator()).mean()
    expected = 1 - math.exp(-math.exp(x + 3))
    assert abs(float(kept) - expected) < 0.01


def test_without_noise_the_likelier_side_is_taken():
    edge = MEDIAN_NOISE * -1 - 3.0
    x = torch.tensor([edge - 1e-3, edge + 1e-3])
    assert gumbel_sigmoid(x, 3.0, 0.4, None).tolist() == [0.0, 1.0]
    below, above = (1 - math.exp(-math.exp(logit + 3.0)) for logit in x.tolist())
    assert below < 0.5 < above


def test_softmax_is_one_hot_with_the_soft_gradient():
    x = torch.randn(5, 4, generator=generator(), requires_grad=True)
    chosen = gumbel_softmax(x, 0.4, None)
    assert torch.equal(chosen.sum(-1), torch.ones(5))
    assert torch.equal(chosen.argmax(-1), x.argmax(-1))
    weights = torch.randn(5, 4, generator=generator(1))
    (chosen * weights).sum().backward()
    soft = x.detach().clone().requires_grad_()
    (torch.softmax(soft / 0.4, -1) * weights).sum().backward()
    torch.testing.assert_close(x.grad, soft.grad)


def test_noisy_choices_follow_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0]).expand(30000, 3)
    shares = gumbel_softmax(logits, 0.4, generator()).mean(0)
    torch.testing.assert_close(shares, torch.softmax(logits[0], -1), atol=0.01, rtol=0)


@pytest.mark.parametrize("k", [1, 3, 6, 7])
def test_best_keeps_exactly_k(k):
    x = torch.randn(11, 7, generator=generator()).round(decimals=0)  # with ties
    kept = hard_top_k(x, k, 0.4)
    assert torch.equal(kept.sum(-1), torch.full((11,), float(k)))
    for row, mask in zip(x, kept.bool(), strict=True):
        assert k == 7 or row[mask].min() >= row[~mask].max()


def test_best_has_its_gradient_at_the_edge():
    x = torch.tensor([[3.0, 1.0, 0.0, -4.0]], requires_grad=True)
    hard_top_k(x, 2, 0.5).sum().backward()
    y = torch.sigmoid((x.detach() - 0.5) / 0.5)
    torch.testing.assert_close(x.grad, y * (1 - y) / 0.5)


def test_noise_is_the_generators():
    like = torch.zeros(1000)
    assert torch.equal(gumbel_noise(like, generator(5)), gumbel_noise(like, generator(5)))
    assert not torch.equal(gumbel_noise(like, generator(5)), gumbel_noise(like, generator(6)))
    assert torch.equal(gumbel_noise(like, None), like)
    assert abs(float(gumbel_noise(torch.zeros(100000), generator()).mean()) - 0.5772) < 0.02
