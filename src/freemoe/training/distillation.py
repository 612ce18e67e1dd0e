"""Losses of a model's predictions, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def distillation_loss(student: Tensor, teacher: Tensor, head: Callable[[Tensor], Tensor], chunk: int = 1024) -> Tensor:
    """KL(teacher || student) of the next-token distributions, mean over the tokens, in float32.

    ``student`` and ``teacher``: (tokens, hidden), what goes into the head; the student's carries the gradient. It is ()
    float32, zero where there is no token.
    """

    def chunk_kl(rows: Tensor, some: slice) -> Tensor:
        with torch.no_grad():
            wanted = torch.log_softmax(head(teacher[some]).float(), dim=-1)
        found = torch.log_softmax(head(rows).float(), dim=-1)
        return wanted.exp().flatten() @ (wanted - found).flatten()

    return summed_in_chunks(student, chunk_kl, chunk) / max(1, len(student))


def language_loss(hidden: Tensor, wanted: Tensor, head: Callable[[Tensor], Tensor], chunk: int = 1024) -> Tensor:
    """The negative log-likelihood of the next tokens, their sum, in float32.

    ``hidden``: (tokens, hidden), what goes into the head, carries the gradient; ``wanted``: (tokens,) int64.
    """

    def chunk_cross_entropy(rows: Tensor, some: slice) -> Tensor:
        return F.cross_entropy(head(rows).float(), wanted[some], reduction="sum")

    return summed_in_chunks(hidden, chunk_cross_entropy, chunk)


def summed_in_chunks(hidden: Tensor, part: Callable[[Tensor, slice], Tensor], chunk: int) -> Tensor:
    """The sum over rows of a function of hidden states, with its gradient made along with it, some rows at a time.

    What the function makes of ``chunk`` rows, as their logits, is gone before the next rows are taken: nothing of it is
    kept for the backward pass, and nothing is made twice. ``part`` makes of rows of ``hidden`` (tokens, hidden), and where
    they stand, their sum ().
    """
    found: Any = _InChunks.apply(hidden, part, chunk)
    return found


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, part: Callable[[Tensor, slice], Tensor], chunk: int) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), chunk):
            some = slice(start, start + chunk)
            with torch.set_grad_enabled(wanted):
                rows = hidden[some].detach().requires_grad_(wanted)
                loss = part(rows, some)
            if gradient is not None:
                gradient[some] = torch.autograd.grad(loss, rows)[0]
            total += loss.detach()
        ctx.save_for_backward(*([] if gradient is None else [gradient]))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        return ctx.saved_tensors[0] * up, None, None
