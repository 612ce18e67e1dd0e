"""Batches of prompts with their gold answers: what calibration reads and what the loss is taken on.

Shapes: B rows, L longest row of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.evals.engine.output_head import forward_to_head, summed_loss
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document
from freemoe.kernels.waits import numbers_of


@dataclass(frozen=True, eq=False)
class AnswerBatch:
    """Rows padded on the right.

    All but the ids is the host's, which so knows without waiting for a device how many tokens count, and where.
    """

    ids: Tensor  # ``(B, L)`` input ids, where the model is: prompt and answer, without the answer's last token
    mask: Tensor  # ``(B, L)`` 1 at real tokens
    targets: Tensor  # ``(B, L)`` token each position predicts where it is the answer's, else -100
    labels: Tensor  # ``(B,)`` number of the subdomain of each row

    @property
    def answer_tokens(self) -> int:
        """How many tokens the loss is taken on."""
        return int((self.targets != -100).sum())


Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a document: input ids (cut to the context, without the last answer token) and the answer's ids."""


def gold_rows(scorer: Scorer, documents: Sequence[Document]) -> list[Row]:
    """Prompt and gold answer of every document, as `answer_batches` takes them."""
    pairs = [scorer.fit_to_context(scorer.gold_pair(d), d.task) for d in documents]
    return [(pair.inputs, pair.continuation) for pair in pairs]


def answer_batches(rows: Sequence[Row], labels: Sequence[int], batch_tokens: int, device: Any) -> list[AnswerBatch]:
    """Pack rows into batches of at most ``batch_tokens`` padded tokens, the longest first.

    Padded tokens are rows times the longest row; labels are the documents' subdomains.
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
        own = torch.tensor([labels[i] for i in chunk])
        batches.append(AnswerBatch(ids.to(device, non_blocking=True), mask, targets, own))
    return batches


def rows_of(batches: Sequence[AnswerBatch]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rows that `answer_batches` packed, batch by batch: input ids and answer ids of every document."""
    rows = []
    for batch in batches:
        for ids, mask, targets in zip(batch.ids.cpu(), batch.mask, batch.targets, strict=True):
            rows.append((tuple(ids[mask.bool()].tolist()), tuple(targets[targets != -100].tolist())))
    return rows


def answer_loss(model: Any, batch: AnswerBatch) -> Tensor:
    """Sum of the answers' cross-entropies in nats, fp32 (a scalar that can be differentiated); see `finite_values`.

    Only the answers' positions go through the output head, some at a time, so that their logits are never there at once.
    """
    targets, device = batch.targets.flatten(), batch.ids.device
    at = (targets != -100).nonzero().flatten()
    wanted, at = (t.to(device, non_blocking=True) for t in (targets[at], at))
    # Right padding under causal attention needs no mask: no real token looks at it.
    return summed_loss(forward_to_head(model, at, input_ids=batch.ids, use_cache=False), wanted)


def finite_values(losses: Sequence[Tensor]) -> list[float]:
    """The values of losses: here the host waits for them, once.

    Raises:
        NumericError: One is NaN or infinite.
    """
    values = numbers_of(losses)
    if not all(map(math.isfinite, values)):
        raise NumericError(
            "The loss on the reference documents is NaN or infinite. The checkpoint or its dtype is broken for this text; "
            "try --dtype float32."
        )
    return values


@torch.no_grad()
def mean_loss(model: Any, batches: Sequence[AnswerBatch], checkpoint: UnitState = NO_CHECKPOINT) -> float:
    """Mean cross-entropy per answer token over all batches, in nats; ``checkpoint`` keeps the sum after each batch."""
    sums: list[Tensor] = []

    def load_state(state: dict[str, Tensor]) -> None:
        sums.append(state["total"])

    def to_state() -> dict[str, Tensor]:
        return {"total": torch.tensor(sum(finite_values(sums)), dtype=torch.float64)}

    for batch in checkpoint.resume_iter(batches, to_state, load_state):
        sums.append(answer_loss(model, batch).double())
    return float(to_state()["total"]) / max(1, sum(b.answer_tokens for b in batches))
