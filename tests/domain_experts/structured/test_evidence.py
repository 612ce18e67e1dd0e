"""Which share of units counts as harmless: simulated losses, and the order in which shares are tested."""

from types import SimpleNamespace

import numpy as np
import pytest

from freemoe.core.errors import FreeMoEError
from freemoe.domain_experts.structured.evidence import MARGINS, is_harmless, largest_harmless
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.tasks.documents import Document
from freemoe.recipes import recipe_from


def documents(count, text=False):
    return [Document("t", str(i), f"k{i}", "text" if text else "target", f"{i}") for i in range(count)]


def scores(values):
    return [DocumentScore(float(v), float(v), 10) for v in values]


@pytest.mark.parametrize("count", [100, 300])
@pytest.mark.parametrize("won", [0.0, 0.02, 0.1])
def test_answers_that_lose_the_margin_rarely_count_as_harmless(count, won):
    rng, docs, passed = np.random.default_rng(0), documents(count), 0
    for _ in range(300):
        drawn = rng.random(count)
        gains = np.where(drawn < won, 1.0, np.where(drawn < 2 * won + 0.01, -1.0, 0.0))
        base = np.where(gains == 0, 1.0, (1 - gains) / 2)
        passed += is_harmless(scores(base + gains), scores(base), docs, MARGINS[False])
    assert passed / 300 <= 0.05


@pytest.mark.parametrize("count", [30, 100, 300])
@pytest.mark.parametrize("tail", [3, 30])
def test_text_that_loses_the_margin_rarely_counts_as_harmless(count, tail):
    rng, docs, passed = np.random.default_rng(0), documents(count, text=True), 0
    base = scores(np.full(count, -2.0))
    for _ in range(300):
        passed += is_harmless(scores(-2.01 + 0.05 * rng.standard_t(tail, count)), base, docs, MARGINS[True])
    assert passed / 300 <= 0.05


def test_enough_documents_show_that_nothing_is_lost_and_few_show_nothing():
    same = [1.0] * 399
    for count, harmless in ((19, False), (100, False), (400, True)):
        found = is_harmless(scores([1, *same][:count]), scores([0, *same][:count]), documents(count), 1.0)
        assert found is harmless, count


@pytest.mark.parametrize(
    ("losses", "largest"), [((0, 0, 9), 0.2), ((9, 0, 0), 0.0), ((0, 9, 0), 0.1), ((0, 0, 0), 0.3)]
)
def test_shares_are_tested_from_the_smallest_up_until_one_fails(losses, largest):
    points = [SimpleNamespace(requested=s, share=s, off=x) for s, x in zip((0.1, 0.2, 0.3), losses, strict=True)]
    found = SimpleNamespace(units=SimpleNamespace(mask=lambda off: off), curve=SimpleNamespace(points=points))
    asked = []

    def score(name, off, docs):
        asked.append(name)
        return scores([-2.0 - (0 if name == "base" else off())] * len(docs))

    guard = documents(30, text=True)
    assert largest_harmless(found, guard, score, None) == {
        "largest_share": largest, "margin": 0.01, "guard_documents": 30
    }  # fmt: skip
    failed = next((i for i, loss in enumerate(losses) if loss), 2)
    assert asked == ["base", *(f"units {s}" for s in (0.1, 0.2, 0.3)[: failed + 1])]


@pytest.mark.parametrize("margin", [0, -1, float("nan")])
def test_a_margin_is_above_zero(margin):
    with pytest.raises(FreeMoEError, match="margin"):
        recipe_from({"command": "build", "model": "x", "domains": {"a": ["demo:code"]}, "units": {"margin": margin}})
