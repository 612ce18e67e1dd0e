"""The divergence of a student's predictions from its teacher's, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def distillation_loss(
    student: Tensor, teacher: Tensor, head: Callable[[Tensor], Tensor], counted: Tensor, chunk: int = 1024
) -> Tensor:
    """KL(teacher || student) of the next-token distributions, mean over the tokens that count, in float32.

    Logits are made of ``chunk`` tokens at a time and made again in the backward pass, so that no (tokens, vocabulary) of
    the whole batch is ever held.

    Args:
        student: (tokens, hidden), what goes into the head; carries the gradient.
        teacher: (tokens, hidden).
        head: Hidden states to logits.
        counted: (tokens,) bool.
        chunk: Tokens at a time.

    Returns:
        () float32, nats per token; zero where no token counts.
    """
    student, teacher = student[counted], teacher[counted]

    def part(mine: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = torch.log_softmax(head(other).float(), dim=-1)
        found = torch.log_softmax(head(mine).float(), dim=-1)
        return (wanted.exp() * (wanted - found)).sum()

    total = student.new_zeros((), dtype=torch.float32)
    for start in range(0, len(student), chunk):
        some = slice(start, start + chunk)
        total = total + checkpoint(part, student[some], teacher[some], use_reentrant=False)
    return total / max(1, len(student))
