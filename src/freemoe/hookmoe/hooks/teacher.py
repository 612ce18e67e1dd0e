"""What the full model says, kept: its most likely next tokens, so that it runs once over every text.

The teacher is the same weights at full k. Its distribution is kept as its ``top`` most likely tokens and, as one more
outcome, all the others together; with ``top`` at the size of the vocabulary nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from freemoe.core.run.progress import Progress, QuietProgress
from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.evals.engine.output_head import forward_blocks_to_head
from freemoe.text.blocks import PackedBlocks
from freemoe.training.states import State

_SAID = ("tokens", "logs", "rest")


@dataclass(frozen=True)
class TeacherLogits:
    """The full model's next-token distribution over some blocks."""

    tokens: Tensor  # (rows, length - 1, top) int32, the most likely next tokens
    logs: Tensor  # (rows, length - 1, top) float32, their log-probabilities
    rest: Tensor  # (rows, length - 1) float32, the log-probability of all others together; -inf where there are none

    def __getitem__(self, which: Tensor | slice) -> TeacherLogits:
        """Some rows; or the places where a (rows, length - 1) bool says so, in one row: (places, top)."""
        return TeacherLogits(self.tokens[which], self.logs[which], self.rest[which])


def top_of(logits: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely tokens, their log-probabilities, and that of the rest: logits (..., vocabulary)."""
    logs = F.log_softmax(logits.float(), dim=-1)
    top = min(top, logs.shape[-1])
    kept, tokens = logs.topk(top, dim=-1)
    if top == logs.shape[-1]:
        return tokens.int(), kept, torch.full_like(kept[..., 0], -torch.inf)
    rest = torch.logsumexp(logs.scatter(-1, tokens, -torch.inf), dim=-1)
    return tokens.int(), kept, rest


@torch.no_grad()
def compute_teacher_logits(
    model: Any,
    blocks: PackedBlocks,
    top: int,
    progress: Progress | None = None,
    name: str = "teacher",
    checkpoint: UnitState = NO_CHECKPOINT,
) -> TeacherLogits:
    """Run the model as it is over all blocks and keep what it says."""
    with (progress or QuietProgress()).stage(name, len(blocks)) as advance:

        def compute_batch(batch: PackedBlocks) -> State:
            ending = forward_blocks_to_head(model, batch)
            parts = [top_of(ending.logits(part), top) for part, _ in ending.iter_chunks()]
            said = (torch.cat(p).cpu().unflatten(0, (len(batch), -1)) for p in zip(*parts, strict=True))
            advance(len(batch))
            return dict(zip(_SAID, said, strict=True))

        found = checkpoint.map_items(blocks.iter_batches(), compute_batch)
    return TeacherLogits(*(torch.cat([said[name] for said in found]) for name in _SAID))


def kl_from_teacher(teacher: TeacherLogits, logits: Tensor) -> Tensor:
    """KL(teacher || student) in nats: logits (..., vocabulary) -> (...).

    Over the teacher's kept tokens and the rest as one outcome, so never above the KL over the whole vocabulary.
    """
    logs = F.log_softmax(logits.float(), dim=-1)
    said = (teacher.tokens, teacher.logs, teacher.rest)
    tokens, theirs, rest = (part.to(logs.device, non_blocking=True) for part in said)
    index = tokens.long()
    mine = logs.gather(-1, index)
    found = (theirs.exp() * (theirs - mine)).sum(-1)
    if index.shape[-1] < logs.shape[-1]:
        # log(1 - sum of the kept), from the others themselves: the difference would lose all digits near 1.
        others = torch.logsumexp(logs.scatter(-1, index, -torch.inf), dim=-1)
        found = found + rest.exp() * (rest - others)
    return found
