"""Log-likelihoods of planned requests: every prefix once, answers as branches, the head on the answers' positions only.

Log-softmax and sums are fp32 and fp64 for every dtype of the weights: bf16 sums tie and flip answers.

Shapes: B rows of a batch, P prefix tokens, L longest row behind it, N wanted positions of a batch, n of them at a time,
H hidden size, V vocabulary, T tokens to be looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freemoe.evals.engine.output_head import DeferredLogits, forward_to_head
from freemoe.evals.engine.row_plan import PrefixGroup, SharedContext
from freemoe.evals.engine.shared_cache import SharedCache


class LikelihoodBatch(NamedTuple):
    """Strands with their branches as tensors."""

    ids: Tensor  # ``(B, L)``, padded on the right: attention is causal, so padding needs no mask
    depths: Tensor | None  # ``(B, L)``: position of each token in its own row; None without branches
    branches: Tensor | None  # ``(B, L)``: 0 on the trunk, then the number of the branch; None without branches
    wanted: Tensor  # ``(N,)``: places in ``B L`` whose logits are needed
    at: Tensor  # ``(T,)``: places in ``wanted``
    tokens: Tensor  # ``(T,)``: the token to be looked up there
    owners: Tensor  # ``(T,)``: the request it belongs to


class GroupTensors(NamedTuple):
    """A group as tensors: its prefix ``(1, P)`` or None, and its batches."""

    prefix: Tensor | None
    batches: list[LikelihoodBatch]


def tensors_of(groups: Sequence[PrefixGroup], device: Any) -> list[GroupTensors]:
    """Turn a plan into tensors on the model's device."""
    return [
        GroupTensors(
            torch.tensor([group.prefix], device=device) if group.prefix else None,
            [_make_batch(strands, len(group.prefix), device) for strands in group.batches],
        )
        for group in groups
    ]


def _make_batch(strands: list[SharedContext], prefix: int, device: Any) -> LikelihoodBatch:
    longest = max(s.tokens_after_prefix(prefix) for s in strands)
    branching = any(len(s.branches) > 1 for s in strands)
    ids, depths, branches = [], [], []
    wanted: list[int] = []
    at: list[int] = []
    tokens: list[int] = []
    owners: list[int] = []
    for row, strand in enumerate(strands):
        line = list(strand.trunk[prefix:])
        depth = list(range(prefix, len(strand.trunk)))
        branch = [0] * len(line)
        fork = len(wanted)
        wanted.append(row * longest + len(line) - 1)
        for number, (answer, targets) in enumerate(strand.branches.items(), start=1):
            places = [fork, *range(len(wanted), len(wanted) + len(answer))]
            start = row * longest + len(line)
            wanted += range(start, start + len(answer))
            line += answer
            depth += range(len(strand.trunk), len(strand.trunk) + len(answer))
            branch += [number] * len(answer)
            for owner, last in targets:
                at += places
                tokens += (*answer, last)
                owners += [owner] * len(places)
        padding = [0] * (longest - len(line))
        ids.append(line + padding)
        # Padding counts as trunk, so that it sees something; nothing stands behind it that could see it.
        depths.append(depth + padding)
        branches.append(branch + padding)

    def long_tensor(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return LikelihoodBatch(
        long_tensor(ids),
        long_tensor(depths) if branching else None,
        long_tensor(branches) if branching else None,
        long_tensor(wanted),
        long_tensor(at),
        long_tensor(tokens),
        torch.tensor(owners, dtype=torch.long),
    )


def branch_mask(branches: Tensor, prefix: int, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores so that every token sees the prefix, its trunk and its own branch.

    ``branches``: ``(B, L)``: 0 on the trunk, then the number of the branch. ``dtype``: of the model: a mask of booleans
    would be added as ones and zeros by some attention functions. Gives ``(B, 1, L, P + L)``: 0, or the least finite number.
    """
    rows, length = branches.shape
    own = branches[:, :, None] == branches[:, None, :]
    trunk = branches[:, None, :] == 0
    seen = (own | trunk) & torch.ones(length, length, dtype=torch.bool, device=branches.device).tril()
    mask = torch.zeros(rows, 1, length, prefix + length, dtype=dtype, device=branches.device)
    mask[:, 0, :, prefix:].masked_fill_(~seen, torch.finfo(dtype).min)
    return mask


def fill_prefix(model: Any, ids: Tensor, room: int = 0) -> SharedCache:
    """Run a prefix ``(1, P)`` once, without the head; ``room`` as `SharedCache`'s."""
    cache = SharedCache(room)
    nowhere = torch.empty(0, dtype=torch.long, device=ids.device)
    forward_to_head(model, nowhere, input_ids=ids, past_key_values=cache, use_cache=True)
    cache.end_prefix()
    return cache


def score_requests(model: Any, work: Sequence[GroupTensors], count: int) -> tuple[list[float], list[bool]]:
    """Score what was planned, on the weights as they are.

    Gives for each of ``count`` requests the sum of its tokens' log-likelihoods in nats, and whether each of them is the
    likeliest.
    """
    sums = torch.zeros(count, dtype=torch.float64)
    misses = torch.zeros(count, dtype=torch.long)
    for group in work:
        cache = None if group.prefix is None else fill_prefix(model, group.prefix)
        for batch in group.batches:
            likely, best = _look_up(_run_to_head(model, batch, cache), batch.at, batch.tokens)
            sums.index_add_(0, batch.owners, likely.double().cpu())
            misses.index_add_(0, batch.owners, (~best).long().cpu())
    return sums.tolist(), (misses == 0).tolist()


def _run_to_head(model: Any, batch: LikelihoodBatch, cache: SharedCache | None) -> DeferredLogits:
    extra: dict[str, Any] = {"use_cache": False}
    prefix = 0
    if cache is not None:
        cache.reset_to_prefix()
        prefix = cache.prefix
        extra = {"use_cache": True, "past_key_values": cache}
    if batch.branches is not None:
        extra["attention_mask"] = branch_mask(batch.branches, prefix, model.dtype)
        extra["position_ids"] = batch.depths
    return forward_to_head(model, batch.wanted, input_ids=batch.ids, **extra)


def _look_up(ending: DeferredLogits, at: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-likelihood ``(T,)`` in fp32 of tokens at rows ``(N, H)`` of an ending, and whether each is the likeliest."""
    values = torch.empty(len(at), device=at.device)
    best = torch.empty(len(at), dtype=torch.bool, device=at.device)
    for rows, place in ending.iter_chunks():
        logits = ending.logits(rows).float()  # (n, V)
        here = ((at >= place.start) & (at < place.stop)).nonzero().flatten()
        row, token = at[here] - place.start, tokens[here]
        values[here] = logits[row, token] - logits.logsumexp(-1)[row]
        best[here] = logits.argmax(-1)[row] == token
    return values, best
