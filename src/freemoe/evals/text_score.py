"""How well a model predicts text: sums per block, from which every figure on text is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.evals.engine.output_head import forward_blocks_to_head
from freemoe.text.blocks import PackedBlocks
from freemoe.training.states import State


@dataclass(frozen=True)
class TextScore:
    """Sums over the predicted tokens of every block, (blocks,) float64 each."""

    ce: Tensor  # Cross-entropy in nats
    kl: Tensor  # KL from another model in nats; zeros where there is none
    tokens: Tensor  # Predicted tokens
    right: Tensor  # Tokens that were the most likely one

    @property
    def mean_ce(self) -> float:
        """Mean cross-entropy in nats per token."""
        return float(self.ce.sum() / self.tokens.sum())

    @property
    def mean_kl(self) -> float:
        """Mean KL from the other model in nats per token."""
        return float(self.kl.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """Perplexity over all tokens together; capped, so that it stays finite."""
        return math.exp(min(700.0, self.mean_ce))

    @property
    def accuracy(self) -> float:
        """Share of the tokens that were the most likely one."""
        return float(self.right.sum() / self.tokens.sum())

    def sums(self) -> dict[str, list[float]]:
        """Per block, ready for JSON."""
        return {"nll": self.ce.tolist(), "right": self.right.long().tolist(), "tokens": self.tokens.long().tolist()}


@torch.no_grad()
def score_text(
    model: Any,
    blocks: PackedBlocks,
    divergence: Callable[[slice], Callable[[slice, Tensor], Tensor]] | None = None,
    on_rows: Callable[[int], None] | None = None,
    checkpoint: UnitState = NO_CHECKPOINT,
) -> TextScore:
    """Predict every token of every passage from the passage's tokens before it in the block.

    What was measured is kept between two batches. ``on_rows`` is told how many blocks more are done.

    ``divergence`` gives, for a slice of the blocks, what makes of a slice of their places (blocks (length - 1)) and the logits
    there (n, vocabulary), fp32, the KL from another model (n,).
    """
    names = [field.name for field in fields(TextScore)]

    def score_batch(numbered: tuple[int, PackedBlocks]) -> State:
        number, batch = numbered
        first, ending = number * blocks.rows_at_once, forward_blocks_to_head(model, batch)
        kl_at = divergence(slice(first, first + len(batch))) if divergence else None
        target, found = batch.ids[:, 1:].flatten(), []
        for rows, at in ending.iter_chunks():
            logits = ending.logits(rows).float()
            wanted = target[at].to(logits.device)
            ce = F.cross_entropy(logits, wanted, reduction="none")
            kl = kl_at(at, logits) if kl_at else torch.zeros_like(ce)
            found.append((ce, kl, torch.ones_like(ce), (logits.argmax(-1) == wanted).float()))
        counted = batch.prediction_mask()
        sums = (torch.cat(p).cpu().view_as(counted).double() for p in zip(*found, strict=True))
        if on_rows is not None:
            on_rows(len(batch))
        # A place that is not predicted may have any loss, also an infinite one.
        return dict(zip(names, (torch.where(counted, x, 0.0).sum(1) for x in sums), strict=True))

    parts = checkpoint.map_items(enumerate(blocks.iter_batches()), score_batch)
    return TextScore(*(torch.cat([part[name] for part in parts]) for name in names))
