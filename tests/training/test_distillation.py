"""The divergence against its formula, computed the long way."""

import pytest
import torch

from freemoe.training.distillation import distillation_loss


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_distillation_is_the_divergence_whatever_the_chunk(chunk):
    g = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(6, 11)
    student = torch.randn(10, 6, generator=g, requires_grad=True)
    teacher = torch.randn(10, 6, generator=g)
    found = distillation_loss(student, teacher, head, chunk)
    (own,) = torch.autograd.grad(found, student)
    p = torch.softmax(head(teacher), -1)
    expected = (p * (p.log() - torch.log_softmax(head(student), -1))).sum(-1).mean()
    (wanted,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, wanted)


def test_distillation_of_the_teacher_itself_is_zero():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    head = torch.nn.Linear(4, 9)
    assert float(distillation_loss(x, x, head).detach()) == pytest.approx(0.0, abs=1e-6)
    assert float(distillation_loss(x[:0], x[:0], head)) == 0.0
