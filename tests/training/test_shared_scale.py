"""One scale per tensor: against Adam's formula with the mean of its second moments; other groups are AdamW's to the bit."""

import pytest
import torch
from torch import nn

from freemoe.training.shared_scale import SharedScaleAdamW
from freemoe.training.states import load_optimizer, optimizer_state


def gradients(steps):
    g = torch.Generator().manual_seed(0)
    # Entries whose gradients differ by orders of magnitude.
    return torch.randn(steps, 6, generator=g) * torch.tensor([1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0]) + 0.01


def test_entries_share_the_mean_of_their_second_moments():
    p = nn.Parameter(torch.zeros(6))
    optimizer = SharedScaleAdamW([{"params": [p], "lr": 0.1, "shared": True}])
    expected, first, second = torch.zeros(6), torch.zeros(6), torch.zeros(6)
    for n, grad in enumerate(gradients(8), start=1):
        p.grad = grad.clone()
        optimizer.step()
        first, second = 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * grad**2
        moved = (first / (1 - 0.9**n)) / (second / (1 - 0.99**n)).mean().sqrt()
        # None moves by more than the rate.
        expected = expected - 0.1 * moved.clamp(-1, 1)
    torch.testing.assert_close(p.detach(), expected)


def test_noise_moves_little_where_adam_would_move_it_as_far_as_all():
    moved = []
    for shared in (True, False):
        p = nn.Parameter(torch.zeros(6))
        optimizer = SharedScaleAdamW([{"params": [p], "lr": 0.1, "shared": shared}], weight_decay=0.0)
        p.grad = gradients(1)[0] - 0.01
        optimizer.step()
        moved.append(p.detach().abs())
    assert float(moved[1].min()) > 0.09
    assert float(moved[0].max()) == pytest.approx(0.1)
    assert float(moved[0][0]) < 1e-3 * float(moved[0].max())


def test_other_groups_are_adamws_to_the_bit():
    ours, theirs, beside = (nn.Parameter(torch.ones(6)) for _ in range(3))
    own = SharedScaleAdamW(
        [{"params": [ours], "lr": 0.01}, {"params": [beside], "lr": 0.1, "shared": True}], weight_decay=0.05
    )
    plain = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.05)
    for grad in gradients(5):
        ours.grad, theirs.grad, beside.grad = grad.clone(), grad.clone(), grad.clone()
        own.step()
        plain.step()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, beside)


def test_a_loaded_state_goes_on_as_if_never_stopped():
    def made():
        p = nn.Parameter(torch.zeros(6))
        return p, SharedScaleAdamW([{"params": [p], "lr": 0.1, "shared": True}])

    (whole, unbroken), (second, later) = made(), made()
    rows = gradients(9)
    for n, grad in enumerate(rows):
        if n == 4:
            state = {name: t.clone() for name, t in optimizer_state(unbroken).items()}
            second.data.copy_(whole)
        whole.grad = grad.clone()
        unbroken.step()
    load_optimizer(later, state)
    for grad in rows[4:]:
        second.grad = grad.clone()
        later.step()
    assert torch.equal(whole, second)
