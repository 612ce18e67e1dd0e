"""Calibration: errors and thresholds by hand, and temperatures that are found again."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from freemoe.domain_experts.route.confidence import abstention_threshold, fit_temperature, most_likely
from freemoe.domain_experts.route.confidence import expected_calibration_error as calibration_error


def drawn(count, classes, temperature, seed):
    """Logits, and classes drawn with the probabilities of the logits over the temperature: whether the top is right."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, classes, generator=generator)
    true = torch.multinomial(torch.softmax(logits / temperature, 1), 1, generator=generator).flatten()
    return logits, (logits.argmax(1) == true).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_most_likely_one(seed):
    logits, right = drawn(200, 3, 1.7, seed)
    hits = sum(right)
    target = [(hits + 1) / (hits + 2) if r else 1 / (200 - hits + 2) for r in right]

    def loss(heat):
        total = 0.0
        for row, t in zip(logits.tolist(), target, strict=True):
            e = [math.exp(v / math.exp(heat)) for v in row]
            total -= t * math.log(max(e) / sum(e)) + (1 - t) * math.log(1 - max(e) / sum(e))
        return total

    expected = math.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x)
    assert fit_temperature(logits, right) == pytest.approx(expected, rel=0.03)


def test_never_certain_after_a_few_right_answers():
    logits = torch.tensor([[9.0, 0.0]] * 18)
    sure, _ = most_likely(logits, fit_temperature(logits, [True] * 18))
    # Right 18 times of 18: 19 of 20.
    assert float(sure[0]) == pytest.approx(19 / 20, abs=0.01)


def test_nothing_to_fit():
    assert fit_temperature(torch.zeros(0, 3), []) == 1.0
    assert fit_temperature(torch.randn(9, 1), [True] * 9) == 1.0
    assert fit_temperature(torch.zeros(9, 3), [True, False, False] * 3) == 1.0


def test_a_class_that_was_not_known_takes_no_part():
    logits, right = drawn(500, 3, 2.0, 1)
    padded = torch.cat([logits, torch.full((500, 2), -torch.inf)], 1)
    assert fit_temperature(padded, right) == fit_temperature(logits, right)
    assert torch.equal(most_likely(padded, 0.7)[0], most_likely(logits, 0.7)[0])


def test_calibration_error_by_hand():
    # Bins [0.2, 0.3): confidence 0.25, accuracy 0.5; [0.9, 1]: confidence 0.97, accuracy 2/3.
    confidence, right = [0.2, 0.3 - 1e-9, 0.95, 1.0, 0.96], [True, False, True, False, True]
    expected = (2 * abs(0.25 - 0.5) + 3 * abs(0.97 - 2 / 3)) / 5
    assert calibration_error(confidence, right) == pytest.approx(expected)
    assert calibration_error([1.0, 1.0], [True, True]) == 0
    assert calibration_error([], []) == 0
    assert calibration_error([0.5] * 4, [True, True, False, False]) == 0


def test_abstention_threshold():
    confidence, right = [0.9, 0.5, 0.7, 0.6, 0.8], [True, False, True, False, True]
    # From the top: 0.9 0.8 0.7 right, 0.6 0.5 wrong.
    for precision, threshold in ((1.0, 0.7), (0.75, 0.6), (0.6, 0.5)):
        assert abstention_threshold(confidence, right, precision) == threshold
    assert abstention_threshold(confidence, [False] * 5, 0.5) > 1
    assert abstention_threshold([], [], 0.9) > 1
    # A wrong one at the top does not hide that many below it are right.
    assert abstention_threshold([0.99, 0.9, 0.8, 0.7], [False, True, True, True], 0.75) == 0.7


@pytest.mark.parametrize("seed", range(20))
def test_what_passes_the_threshold_has_the_precision(seed):
    rng = np.random.default_rng(seed)
    # Few distinct confidences: those that are equal pass together.
    confidence = rng.choice([0.4, 0.6, 0.9, 1.0], 30)
    right = rng.random(30) < confidence * 0.9
    threshold = abstention_threshold(confidence.tolist(), right.tolist(), 0.8)
    passing = right[confidence >= threshold]
    assert not len(passing) or passing.mean() >= 0.8
    for lower in confidence[confidence < threshold]:
        assert right[confidence >= lower].mean() < 0.8
