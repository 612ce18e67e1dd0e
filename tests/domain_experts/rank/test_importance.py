"""Metrics as pure functions, patches by brute force, and which broken numbers are refused."""

import math

import pytest
import torch

from freemoe.core.errors import NumericError
from freemoe.domain_experts import recipe
from freemoe.domain_experts.rank.importance import METRICS, check_finite, seeded_generator


def some(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_every_metric_of_the_recipes_is_there():
    assert set(METRICS.names()) == set(recipe.METRICS)
    assert all(METRICS.about(name) for name in METRICS)


def test_random_depends_on_seed_and_name_alone():
    weight = some(1, 20, 20)
    draw = METRICS.get("random").scores
    first = draw(weight, None, None, seeded_generator(3, "a"))
    assert torch.equal(first, draw(torch.zeros_like(weight), None, None, seeded_generator(3, "a")))
    assert torch.equal(first, draw(weight.to(torch.bfloat16), None, None, seeded_generator(3, "a")))
    assert not torch.equal(first, draw(weight, None, None, seeded_generator(4, "a")))
    assert not torch.equal(first, draw(weight, None, None, seeded_generator(3, "b")))
    assert 0 <= first.min() <= first.max() < 1
    assert first.unique().numel() > 390


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_scores_are_refused(bad):
    scores = some(1, 3, 4)
    assert check_finite(scores, "w") is scores
    scores[0, 1, 2] = bad
    with pytest.raises(NumericError, match="1 of 12 importance scores of 'w'"):
        check_finite(scores, "w")
