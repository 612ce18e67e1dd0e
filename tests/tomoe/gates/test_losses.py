"""The losses against their formulas, computed the long way."""

import math

import pytest
import torch

from freemoe.tomoe.gates.losses import balance_loss, log_ratio, mask_union, size_loss, union_loss


def test_the_ratio_is_symmetric_and_zero_where_equal():
    a, b = torch.tensor(0.3), torch.tensor(0.7)
    assert float(log_ratio(a, b)) == pytest.approx(math.log(0.7 / 0.3))
    assert float(log_ratio(a, b)) == float(log_ratio(b, a))
    assert float(log_ratio(a, a)) == 0.0
    assert float(log_ratio(a, b, 0.001)) == pytest.approx(math.log(0.701 / 0.301))


def test_size_pushes_both_ways():
    for active, sign in ((0.8, 1), (0.2, -1)):
        x = torch.tensor(active, requires_grad=True)
        size_loss(x, 0.5).backward()
        assert x.grad is not None
        assert math.copysign(1, float(x.grad)) == sign


def test_union_by_brute_force():
    masks = (torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) > 0.6).float()
    expected = [float(any(masks[i, j] for i in range(3))) for j in range(20)]
    assert mask_union(masks).tolist() == expected
    assert float(union_loss(mask_union(masks))) == pytest.approx(math.log(1 / (sum(expected) / 20)))


def test_balance_of_even_and_crowded_routers():
    n = 8
    even = torch.eye(n).repeat(5, 1)
    crowded = torch.zeros(40, n)
    crowded[:, 2] = 1
    assert float(balance_loss(even, torch.full((40, n), 1 / n))) == pytest.approx(1.0)
    assert float(balance_loss(crowded, crowded)) == pytest.approx(n)
    assert float(balance_loss(even, even, "hard")) == pytest.approx(1 / n)
    assert float(balance_loss(crowded, crowded, "hard")) == pytest.approx(1.0)
