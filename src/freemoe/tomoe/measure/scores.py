"""How well a model, converted or not, predicts text: figures that carry the length of context they hold for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.text.blocks import PackedBlocks
from freemoe.training.states import State

TOKENS = 2048
"""In one pass, about: their logits are held at once."""


@dataclass(frozen=True)
class TextScore:
    """Next-token figures on blocks of text."""

    length: int  # Tokens of a block: the longest context
    nll: list[float]  # Per block the sum of negative log-likelihoods, nats
    right: list[int]  # Per block how many next tokens were the most likely ones
    tokens: list[int]  # Per block how many next tokens were predicted

    @property
    def perplexity(self) -> float:
        """Perplexity over all tokens together; capped, so that it stays finite."""
        return math.exp(min(700.0, sum(self.nll) / sum(self.tokens)))

    @property
    def accuracy(self) -> float:
        """Share of the tokens that were the most likely ones."""
        return sum(self.right) / sum(self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, with the figures by name."""
        return {
            f"perplexity@{self.length}": self.perplexity,
            f"next_token_accuracy@{self.length}": self.accuracy,
            "length": self.length,
            "nll": self.nll,
            "right": self.right,
            "tokens": self.tokens,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> TextScore:
        """Inverse of ``to_dict``, for the journal."""
        return cls(record["length"], record["nll"], record["right"], record["tokens"])


@torch.no_grad()
def score_text(
    model: Any,
    blocks: PackedBlocks,
    on_rows: Callable[[int], None] | None = None,
    checkpoint: UnitState = NO_CHECKPOINT,
) -> TextScore:
    """Predict every token of every passage from the passage's tokens before it in the block.

    About `TOKENS` at a time, at least one block.
    """
    device = next(model.parameters()).device
    nll: list[float] = []
    right: list[int] = []
    numbers: list[int] = []

    def to_state() -> State:
        found = torch.tensor(nll, dtype=torch.float64)
        return {"nll": found, "right": torch.tensor(right), "numbers": torch.tensor(numbers)}

    def load_state(state: State) -> None:
        for own, name in ((nll, "nll"), (right, "right"), (numbers, "numbers")):
            own.extend(state[name].tolist())

    for batch in checkpoint.resume_iter(blocks.iter_batches(TOKENS), to_state, load_state):
        ids, positions = batch.ids.to(device), batch.positions.to(device)
        logits = model(ids, position_ids=positions, use_cache=False).logits[:, :-1].float()
        counted, wanted = batch.prediction_mask().to(device), ids[:, 1:]
        losses = torch.logsumexp(logits, -1) - logits.gather(-1, wanted[..., None])[..., 0]
        nll += torch.where(counted, losses, 0.0).double().sum(dim=1).tolist()
        right += ((logits.argmax(-1) == wanted) & counted).sum(dim=1).tolist()
        numbers += counted.sum(dim=1).tolist()
        if on_rows is not None:
            on_rows(len(ids))
    return TextScore(blocks.row_length, nll, right, numbers)
