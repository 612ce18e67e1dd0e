"""Batches of prompts with their gold answers: what calibration reads and what the loss is taken on.

Shapes: B rows, L longest row of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.core.run.unit_state import NOT_KEPT, UnitState
from freemoe.evals.engine.output_head import ending_at, summed_loss
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document


@dataclass(frozen=True, eq=False)
class AnswerBatch:
    """Rows padded on the right.

    Attributes:
        ids: ``(B, L)`` input ids: prompt and answer, without the answer's last token.
        mask: ``(B, L)`` 1 at real tokens.
        targets: ``(B, L)`` token each position predicts where it is the answer's, else -100.
        labels: ``(B,)`` number of the subdomain of each row.
    """

    ids: Tensor
    mask: Tensor
    targets: Tensor
    labels: Tensor

    @property
    def answer_tokens(self) -> int:
        """How many tokens the loss is taken on."""
        return int((self.targets != -100).sum())


Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a document: input ids (cut to the context, without the last answer token) and the answer's ids."""


def gold_rows(scorer: Scorer, documents: Sequence[Document]) -> list[Row]:
    """Prompt and gold answer of every document, as `answer_batches` takes them."""
    pairs = [scorer.gold_pair(d) for d in documents]
    return [(scorer.fit(p, d.task)[0], p.continuation) for p, d in zip(pairs, documents, strict=True)]


def answer_batches(rows: Sequence[Row], labels: Sequence[int], batch_tokens: int, device: Any) -> list[AnswerBatch]:
    """Pack rows into batches of at most ``batch_tokens`` padded tokens, the longest first.

    Args:
        rows: One per document.
        labels: Subdomain of each document.
        batch_tokens: Rows times longest row.
        device: Where the batches shall live.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    batches: list[AnswerBatch] = []
    while order:
        longest = len(rows[order[0]][0])
        size = max(1, batch_tokens // max(1, longest))
        chunk, order = order[:size], order[size:]
        ids = torch.zeros(len(chunk), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        targets = torch.full_like(ids, -100)
        for b, i in enumerate(chunk):
            inputs, answer = rows[i]
            ids[b, : len(inputs)] = torch.tensor(inputs)
            mask[b, : len(inputs)] = 1
            targets[b, len(inputs) - len(answer) : len(inputs)] = torch.tensor(answer)
        batches.append(
            AnswerBatch(
                ids.to(device),
                mask.to(device),
                targets.to(device),
                torch.tensor([labels[i] for i in chunk], device=device),
            )
        )
    return batches


def rows_of(batches: Sequence[AnswerBatch]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rows that `answer_batches` packed, batch by batch: input ids and answer ids of every document."""
    rows = []
    for batch in batches:
        for ids, mask, targets in zip(batch.ids.cpu(), batch.mask.cpu(), batch.targets.cpu(), strict=True):
            rows.append((tuple(ids[mask.bool()].tolist()), tuple(targets[targets != -100].tolist())))
    return rows


def answer_loss(model: Any, batch: AnswerBatch) -> Tensor:
    """Sum of the answers' cross-entropies in nats, fp32 (a scalar that can be differentiated).

    Only the answers' positions go through the output head, some at a time, so that their logits are never there at once.

    Args:
        model: A causal LM.
        batch: Prompts with their answers.
    """
    targets = batch.targets.flatten()
    at = (targets != -100).nonzero().flatten()
    # Right padding under causal attention needs no mask: no real token looks at it.
    loss = summed_loss(ending_at(model, at, input_ids=batch.ids, use_cache=False), targets[at])
    if not bool(torch.isfinite(loss)):
        raise NumericError(
            "The loss on the reference documents is NaN or infinite. The checkpoint or its dtype is broken for this text; "
            "try --dtype float32."
        )
    return loss


@torch.no_grad()
def mean_loss(model: Any, batches: Sequence[AnswerBatch], kept: UnitState = NOT_KEPT) -> float:
    """Mean cross-entropy per answer token over all batches, in nats; ``kept``: where the pass keeps its sum between two."""
    total = 0.0

    def load(state: dict[str, Tensor]) -> None:
        nonlocal total
        total = float(state["total"])

    def state() -> dict[str, Tensor]:
        return {"total": torch.tensor(total, dtype=torch.float64)}

    for batch in kept.over(batches, state, load):
        total += float(answer_loss(model, batch))
    return total / max(1, sum(b.answer_tokens for b in batches))
