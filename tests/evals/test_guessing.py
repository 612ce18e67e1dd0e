"""A base that is no better than guessing is said, with both figures; one that is better is not."""

import math

import pytest

from freemoe.evals.guessing import against_guessing, guessing_text, text_against_guessing
from freemoe.evals.statistics import mean_interval
from freemoe.evals.tasks.documents import Document
from freemoe.results.common import GuessingResult


def questions(choices, kind="choice"):
    return [
        Document("t", str(i), str(i), kind, "q", answers=tuple(f" {c}" for c in range(n)), gold=0)
        for i, n in enumerate(choices)
    ]


def test_chance_is_averaged_over_the_questions():
    asked = questions([2] * 50 + [4] * 50)
    found = against_guessing(asked, [1.0, 0.0, 0.0, 1.0, 0.0] * 20, 40.0, 100)
    assert found is not None
    assert found["guessing"] == pytest.approx(37.5)
    assert found["score"] == pytest.approx(40.0)
    expected = mean_interval([0.5, -0.5, -0.5, 0.5, -0.5] * 20, [d.key for d in asked])
    assert (found["low"], found["high"]) == pytest.approx((100 * expected.low + 50, 100 * expected.high + 50))
    said = guessing_text("law", GuessingResult.model_validate(found))
    assert said.startswith("base: 40.0 % [")
    assert "on law, chance is 37.5 % (100 questions): not to be told from guessing" in said


@pytest.mark.parametrize(
    ("asked", "values", "score", "said"),
    [
        (questions([2] * 100), [1.0, 0, 0, 0] * 25, 25.0, "chance is 50.0 % (100 questions): worse than guessing"),
        (questions([2] * 100), [1.0, 1.0, 1.0, 0.0] * 25, 75.0, ""),
        # The same share of right answers among as many choices more.
        (questions([4] * 100), [1.0, 0.0] * 50, 50.0, ""),
        (questions([2] * 100), [1.0, 0.0] * 50, 50.0, "not to be told from guessing"),
        (questions([1] * 40, "target"), [0.0] * 40, 0.0, ""),
        # All of those with choices are right.
        ([*questions([2] * 40), *questions([1] * 40, "generate")], [1.0] * 40 + [0.0] * 40, 50.0, ""),
    ],
)
def test_only_what_is_no_better_than_guessing_is_told(asked, values, score, said):
    found = against_guessing(asked, values, score, 100)
    assert (found is None) == (said == "")
    assert said in guessing_text("law", GuessingResult.model_validate(found) if found else None)


def test_text_is_held_against_its_vocabulary():
    text = [Document("t", "0", "0", "text", "", answers=("a",), tokens=(1, 2))]
    assert against_guessing(text, [-5.0], 287.9, 288) is None
    found = against_guessing(text, [-6.0], 403.4, 288)
    assert found == text_against_guessing(403.4, 288) == {"unit": "perplexity", "score": 403.4, "guessing": 288.0}
    said = guessing_text("wiki", GuessingResult.model_validate(found))
    assert f"base: {math.log(403.4):.2f} nats per token on wiki (perplexity 403.40)" in said
    assert f"all tokens alike have {math.log(288):.2f} (a vocabulary of 288)" in said
    assert text_against_guessing(288.0, 288) is not None  # no better is not better
