"""The largest scores of many tensors: equal to sorting them all, with any hint, in as few looks as there can be."""

import math

import pytest
import torch

from freemoe.domain_experts.purify.strongest import global_topk


def makers(scores):
    """What `global_topk` is given: something that makes each tensor anew."""
    return [scores[i].clone for i in range(len(scores))]


@pytest.fixture(autouse=True, params=[0, 1 << 18], ids=["by intervals", "few"])
def small(request, monkeypatch):
    """Both ways to find where the largest begin."""
    monkeypatch.setattr("freemoe.domain_experts.purify.strongest._SMALL", request.param)


@pytest.mark.parametrize("above", [0.0, -2.0, 1.0])
def test_strongest_equals_a_slow_sort_with_ties(above):
    generator = torch.Generator().manual_seed(7)
    scores = [torch.randint(-3, 4, (n,), generator=generator).float() for n in (5, 40, 1, 200)]
    ranked = sorted((-float(v), t, i) for t, s in enumerate(scores) for i, v in enumerate(s) if float(v) > above)
    for count in (0, 1, 7, len(ranked) - 1, len(ranked), len(ranked) + 5):
        expected = [sorted(i for _, t, i in ranked[:count] if t == k) for k in range(4)]
        for hint in (math.inf, 2.5, 2.0, 1.0, above, above - 1):
            found = global_topk(makers(scores), count, above, hint)
            assert [m.indices().tolist() for m in found.masks] == expected
            assert found.line == (-ranked[:count][-1][0] if count else math.inf)


def test_strongest_breaks_ties_by_place():
    ties = [torch.tensor([1.0, 2.0, 1.0]), torch.ones(200), torch.zeros(4)]
    assert [m.indices().tolist() for m in global_topk(makers(ties), 3).masks] == [[0, 1, 2], [], []]
    assert [m.indices().tolist() for m in global_topk(makers(ties), 7).masks] == [[0, 1, 2], [0, 1, 2, 3], []]
    assert [m.indices().tolist() for m in global_topk(makers([torch.ones(5000)]), 10).masks] == [list(range(10))]
    assert [m.indices().tolist() for m in global_topk(makers([-torch.ones(3), torch.zeros(2)]), 2).masks] == [[], []]


def test_a_good_hint_spares_a_look_and_a_bad_one_costs_one():
    generator = torch.Generator().manual_seed(1)
    scores = [torch.randn(n, generator=generator) for n in (500, 4000)]
    asked = []

    def makers_that_count():
        return [lambda i=i: asked.append(i) or scores[i].clone() for i in range(2)]

    def looks(hint):
        asked.clear()
        found = global_topk(makers_that_count(), 100, hint=hint)
        return found, len(asked) / 2

    first, number = looks(math.inf)
    assert number == 2
    for hint, expected in ((0.8 * first.line, 1), (first.line * 1.01, 3), (1e-6, 3)):
        again, number = looks(hint)
        # Below a hint of almost nothing lie half of all scores: too many to keep, which is seen before the last tensor.
        assert math.ceil(number) == expected
        assert again.line == first.line
        assert all(a.is_equal(b) for a, b in zip(again.masks, first.masks, strict=True))


def test_zeros_of_both_signs_are_equal():
    zeros = [torch.tensor([-0.0, 0.0, -1.0, 0.0])]
    assert [m.indices().tolist() for m in global_topk([zeros[0].clone], 3, -2.0).masks] == [[0, 1, 3]]
    assert [m.indices().tolist() for m in global_topk([zeros[0].clone], 1, -2.0).masks] == [[0]]
