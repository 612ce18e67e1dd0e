"""Metrics as pure functions, patches by brute force, and which broken numbers are refused."""

import math

import pytest
import torch

from freemoe import recipes
from freemoe.core.errors import NumericError
from freemoe.domain_experts.rank.importance import METRICS, check_finite, seeded_generator


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_metric_of_the_recipes_is_there():
    assert set(METRICS.names()) == set(recipes.METRICS)
    assert all(METRICS.about(name) for name in METRICS)


def test_wanda_is_one_multiplication_in_single_precision():
    weight, norm = torch.tensor([[[1.0, -2.0], [-0.5, 4.0]]]), torch.tensor([[3.0, 0.25]])
    assert METRICS.get("wanda").scores(weight, norm, None, None).tolist() == [[[3.0, 0.5], [1.5, 1.0]]]
    weight, norm = some(3, 5, 7), some(3, 7, seed=1).abs()
    half = weight.to(torch.bfloat16)
    scores = METRICS.get("wanda").scores(half, norm, None, None)
    assert scores.dtype == torch.float32
    for e in range(3):
        for r in range(5):
            for c in range(7):
                assert scores[e, r, c] == half[e, r, c].float().abs() * norm[e, c]


def test_magnitude_needs_nothing():
    weight = some(1, 4, 4)
    assert torch.equal(METRICS.get("magnitude").scores(weight, None, None, None), weight.abs())


def test_saliency_keeps_its_sign():
    weight, gradient = some(2, 3, 4), some(2, 3, 4, seed=1)
    scores = METRICS.get("saliency").scores(weight, None, gradient, None)
    assert torch.equal(scores, weight * gradient)
    assert (scores < 0).any()


def test_random_depends_on_seed_and_name_alone():
    weight = some(1, 20, 20)
    draw = METRICS.get("random").scores
    first = draw(weight, None, None, seeded_generator(3, "a"))
    assert torch.equal(first, draw(torch.zeros_like(weight), None, None, seeded_generator(3, "a")))
    assert torch.equal(first, draw(weight.to(torch.bfloat16), None, None, seeded_generator(3, "a")))
    assert not torch.equal(first, draw(weight, None, None, seeded_generator(4, "a")))
    assert not torch.equal(first, draw(weight, None, None, seeded_generator(3, "b")))
    assert first.min() >= 0
    assert first.max() < 1
    assert first.unique().numel() > 390


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_scores_are_refused(bad):
    scores = some(1, 3, 4)
    assert check_finite(scores, "w") is scores
    scores[0, 1, 2] = bad
    with pytest.raises(NumericError, match="1 of 12 importance scores of 'w'"):
        check_finite(scores, "w")
