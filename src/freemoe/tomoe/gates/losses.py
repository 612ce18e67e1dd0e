"""The losses of a conversion, as functions of tensors (ToMoE Eq. 8-12)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def log_ratio(x: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """f(x, y) = log(max(x, y) / min(x, y)): zero where they agree, the same either way round (ToMoE Eq. 8).

    Args:
        x: (...), positive.
        y: (...), positive.
        smoothing: Added to both inside the logarithm.
    """
    return torch.log((torch.maximum(x, y) + smoothing) / (torch.minimum(x, y) + smoothing))


def size_loss(active: Tensor, share: float, smoothing: float = 0.0) -> Tensor:
    """R_P: how far the active share () of the weights is from the wanted one, either way (ToMoE Eq. 8)."""
    return log_ratio(active, active.new_tensor(share), smoothing)


def union(masks: Tensor) -> Tensor:
    """U = 1 - prod_i (1 - s_i): which neurons some expert keeps. (experts, width) -> (width,) (ToMoE Eq. 10)."""
    return 1 - (1 - masks).prod(dim=0)


def union_loss(masks: Tensor, smoothing: float = 0.0) -> Tensor:
    """R_U of one layer: the share of neurons in the union against one (ToMoE Eq. 10)."""
    covered = union(masks).mean()
    return log_ratio(covered, covered.new_tensor(1.0), smoothing)


def balance_loss(chosen: Tensor, probabilities: Tensor, form: str = "soft") -> Tensor:
    """R_L of one layer: one where tokens spread evenly over experts, larger where they crowd (ToMoE Eq. 9).

    Args:
        chosen: (tokens, experts), one-hot, with or without a gradient.
        probabilities: (tokens, experts), softmax of the router.
        form: ``soft``: N sum_i F_i P_i, the paper's; ``hard``: sum_i F_i F_i with the one-hot's gradient, the authors'
            code, whose even value is 1 / N.
    """
    share = chosen.mean(dim=0)
    if form == "hard":
        return (share.detach() * share).sum()
    return chosen.shape[1] * (share.detach() * probabilities.mean(dim=0)).sum()


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
