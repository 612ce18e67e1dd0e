"""The largest scores of many tensors: equal to sorting them all, with any hint, in as few looks as there can be."""

import math

import pytest
import torch

from freemoe.domain_experts.purify.strongest import global_topk


def strongest(scores, count, *more):
    """What `global_topk` finds when it is given something that makes each tensor anew, and its places by tensor."""
    found = global_topk([score.clone for score in scores], count, *more)
    return found, [mask.indices().tolist() for mask in found.masks]


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
            found, places = strongest(scores, count, above, hint)
            assert places == expected
            assert found.line == (-ranked[:count][-1][0] if count else math.inf)


def test_strongest_breaks_ties_by_place():
    ties = [torch.tensor([1.0, 2.0, 1.0]), torch.ones(200), torch.zeros(4)]
    assert strongest(ties, 3)[1] == [[0, 1, 2], [], []]
    assert strongest(ties, 7)[1] == [[0, 1, 2], [0, 1, 2, 3], []]
    assert strongest([torch.ones(5000)], 10)[1] == [list(range(10))]
    assert strongest([-torch.ones(3), torch.zeros(2)], 2)[1] == [[], []]
    # Zeros of both signs are equal.
    zeros = [torch.tensor([-0.0, 0.0, -1.0, 0.0])]
    assert strongest(zeros, 3, -2.0)[1] == [[0, 1, 3]]
    assert strongest(zeros, 1, -2.0)[1] == [[0]]


def test_a_good_hint_spares_a_look_and_a_bad_one_costs_one():
    generator = torch.Generator().manual_seed(1)
    scores = [torch.randn(n, generator=generator) for n in (500, 4000)]

    def looks(hint):
        asked = []
        found = global_topk([lambda i=i: asked.append(i) or scores[i].clone() for i in range(2)], 100, hint=hint)
        return found, len(asked) / 2

    first, number = looks(math.inf)
    assert number == 2
    for hint, expected in ((0.8 * first.line, 1), (first.line * 1.01, 3), (1e-6, 3)):
        again, number = looks(hint)
        # Below a hint of almost nothing lie half of all scores: too many to keep, which is seen before the last tensor.
        assert math.ceil(number) == expected
        assert again.line == first.line
        assert all(a.is_equal(b) for a, b in zip(again.masks, first.masks, strict=True))
