"""Losses of a model's predictions, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def distillation_loss(
    student: Tensor, teacher: Tensor, head: Callable[[Tensor], Tensor], counted: Tensor, chunk: int = 1024
) -> Tensor:
    """KL(teacher || student) of the next-token distributions, mean over the tokens that count, in float32.

    Args:
        student: (tokens, hidden), what goes into the head; carries the gradient.
        teacher: (tokens, hidden).
        head: Hidden states to logits.
        counted: (tokens,) bool.
        chunk: Tokens at a time.

    Returns:
        () float32, nats per token; zero where no token counts.
    """

    def part(mine: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = torch.log_softmax(head(other).float(), dim=-1)
        found = torch.log_softmax(head(mine).float(), dim=-1)
        return (wanted.exp() * (wanted - found)).sum()

    return _in_chunks(part, student[counted], teacher[counted], chunk) / max(1, int(counted.sum()))


def language_loss(hidden: Tensor, wanted: Tensor, head: Callable[[Tensor], Tensor], chunk: int = 1024) -> Tensor:
    """The negative log-likelihood of the next tokens, their sum, in float32.

    Args:
        hidden: (tokens, hidden), what goes into the head; carries the gradient.
        wanted: (tokens,) int64.
        head: Hidden states to logits.
        chunk: Tokens at a time.

    Returns:
        () float32, nats.
    """

    def part(mine: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(mine).float(), targets, reduction="sum")

    return _in_chunks(part, hidden, wanted, chunk)


def _in_chunks(part: Callable[[Tensor, Tensor], Tensor], student: Tensor, other: Tensor, chunk: int) -> Tensor:
    """Sum of a loss over ``chunk`` rows at a time.

    Their logits are made again in the backward pass, so that no (tokens, vocabulary) of the whole batch is ever held.
    """
    total = student.new_zeros((), dtype=torch.float32)
    for start in range(0, len(student), chunk):
        some = slice(start, start + chunk)
        total = total + checkpoint(part, student[some], other[some], use_reentrant=False)
    return total
