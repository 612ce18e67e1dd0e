"""The losses against their formulas, computed the long way."""

from __future__ import annotations

import math

import pytest
import torch

from freemoe.tomoe.gates.losses import balance_loss, log_ratio, mask_union, size_loss, union_loss
from freemoe.training.straight_through import gumbel_probabilities, gumbel_softmax


def test_the_ratio_is_symmetric_and_zero_where_equal() -> None:
    a, b = torch.tensor(0.3), torch.tensor(0.7)
    assert float(log_ratio(a, b)) == pytest.approx(math.log(0.7 / 0.3))
    assert float(log_ratio(a, b)) == float(log_ratio(b, a))
    assert float(log_ratio(a, a)) == 0.0
    assert float(log_ratio(a, b, 0.001)) == pytest.approx(math.log(0.701 / 0.301))


def test_size_pushes_both_ways() -> None:
    for active, sign in ((0.8, 1), (0.2, -1)):
        x = torch.tensor(active, requires_grad=True)
        size_loss(x, 0.5).backward()
        assert x.grad is not None
        assert math.copysign(1, float(x.grad)) == sign


def test_union_by_brute_force() -> None:
    masks = (torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) > 0.6).float()
    expected = [float(any(masks[i, j] for i in range(3))) for j in range(20)]
    assert mask_union(masks).tolist() == expected
    assert float(union_loss(mask_union(masks))) == pytest.approx(math.log(1 / (sum(expected) / 20)))


def test_union_teaches_only_what_no_other_expert_keeps() -> None:
    masks = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], requires_grad=True)
    mask_union(masks).sum().backward()
    assert masks.grad is not None
    assert masks.grad.tolist() == [[0.0, 0.0, 1.0], [0.0, 1.0, 1.0]]


def test_the_papers_balance_has_the_noise_and_the_temperature_of_the_choice() -> None:
    """Eq. 9 with P = mean GSmax(G), and its gradient, from the formulas of App. A.3 alone."""
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def drawn() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    ours, slow = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    balance_loss(gumbel_softmax(ours, 0.4, drawn()).detach(), gumbel_probabilities(ours, 0.4, drawn())).backward()
    noise = -torch.log(-torch.log(torch.rand(12, 4, generator=drawn()).clamp(1e-20, 1 - 1e-7))).double()
    soft = torch.exp((slow + noise) / 0.4)
    soft = soft / soft.sum(1, keepdim=True)
    share = torch.stack([(soft.argmax(1) == expert).double().mean() for expert in range(4)])
    (4 * (share * soft.mean(0)).sum()).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, slow.grad, atol=1e-7, rtol=1e-5)


def test_balance_of_even_and_crowded_routers() -> None:
    n = 8
    even = torch.eye(n).repeat(5, 1)
    crowded = torch.zeros(40, n)
    crowded[:, 2] = 1
    assert float(balance_loss(even, torch.full((40, n), 1 / n))) == pytest.approx(1.0)
    assert float(balance_loss(crowded, crowded)) == pytest.approx(n)
    assert float(balance_loss(even, even, "hard")) == pytest.approx(1 / n)
    assert float(balance_loss(crowded, crowded, "hard")) == pytest.approx(1.0)
