"""The divergence against its formula, computed the long way."""

from __future__ import annotations

import pytest
import torch

from freemoe.training.distillation import distillation_loss


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_distillation_is_the_divergence_whatever_the_chunk(chunk: int) -> None:
    g = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(6, 11)
    student = torch.randn(10, 6, generator=g, requires_grad=True)
    teacher = torch.randn(10, 6, generator=g)
    counted = torch.arange(10) != 4
    found = distillation_loss(student, teacher, head, counted, chunk)
    (own,) = torch.autograd.grad(found, student)
    p = torch.softmax(head(teacher), -1)
    expected = (p * (p.log() - torch.log_softmax(head(student), -1))).sum(-1)[counted].mean()
    (wanted,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, wanted)
    assert torch.equal(own[4], torch.zeros(6))


def test_distillation_of_the_teacher_itself_is_zero() -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    head = torch.nn.Linear(4, 9)
    assert float(distillation_loss(x, x, head, torch.ones(5, dtype=torch.bool)).detach()) == pytest.approx(
        0.0, abs=1e-6
    )
    assert float(distillation_loss(x, x, head, torch.zeros(5, dtype=torch.bool))) == 0.0
