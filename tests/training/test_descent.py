"""Steps and their pace against what they are, written out."""

import math
import weakref

import pytest
import torch
from torch import nn

from freemoe.training.descent import cosine_decay, optimizer_step, warm_cosine


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("steps", [1, 2, 10, 333])
def test_cosine_falls_from_one_to_its_floor(steps, floor):
    for step in range(steps + 1):
        # Half the chord of a circle that is walked half-way round.
        height = (complex(math.cos(math.pi * step / steps), math.sin(math.pi * step / steps)).real + 1) / 2
        assert cosine_decay(step, steps, floor) == pytest.approx(floor * (1 - height) + height, abs=1e-12)
    assert cosine_decay(0, steps, floor) == 1.0
    assert cosine_decay(steps, steps, floor) == pytest.approx(floor, abs=1e-12)
    assert cosine_decay(0, 0, floor) == 1.0


@pytest.mark.parametrize(("steps", "warm"), [(100, 5), (20, 1), (4, 4), (1, 1)])
def test_warm_cosine_climbs_a_line_and_falls_to_nothing(steps, warm):
    found = [warm_cosine(0.3, step, steps, warm) for step in range(steps)]
    slow = []
    for step in range(steps):
        if step < warm:
            slow.append(0.3 * (step + 1) / warm)
        else:
            slow.append(0.15 + 0.15 * math.cos(math.pi * (step - warm) / (steps - warm)))
    assert found == pytest.approx(slow, abs=1e-12)
    assert max(found) == found[warm - 1] == 0.3
    assert all(0 < rate <= 0.3 for rate in found)


def test_a_step_is_the_optimizers_on_the_sum_of_the_losses():
    start = torch.tensor([1.0, -2.0, 3.0])
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours.grad = torch.full((3,), 1e6)  # left over from something else
    one, other = (torch.optim.Adam([p], lr=1.0) for p in (ours, theirs))
    for step, rate in enumerate((0.1, 0.3, 0.2)):
        parts = (((ours - k).square() * k).sum() for k in (1.0, 2.0))
        optimizer_step(one, parts, step, rates=[rate], change=lambda: nn.utils.clip_grad_norm_([ours], 1.0))
        other.param_groups[0]["lr"] = rate
        other.zero_grad()
        sum(((theirs - k).square() * k).sum() for k in (1.0, 2.0)).backward()
        nn.utils.clip_grad_norm_([theirs], 1.0)
        other.step()
    torch.testing.assert_close(ours, theirs)


def test_losses_are_made_one_after_the_other_and_let_go_of():
    p = nn.Parameter(torch.ones(1))
    order, alive = [], weakref.WeakSet()

    def part(name):
        assert not alive
        order.append(f"made {name}")
        loss = p.sum()
        alive.add(loss)
        loss.register_hook(lambda grad: order.append(f"walked {name}"))
        return loss

    optimizer_step(torch.optim.SGD([p], lr=1.0), map(part, "ab"), 0)
    assert order == ["made a", "walked a", "made b", "walked b"]
    assert p.item() == -1.0
