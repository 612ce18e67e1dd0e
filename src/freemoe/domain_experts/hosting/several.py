"""A batch whose sequences belong to several experts, run by one strategy or another; all give equal answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor

from freemoe.core.errors import DataError, RecipeError
from freemoe.domain_experts.hosting.batches import (
    FORWARD_ALONE,
    GENERATE_ALONE,
    batch_size,
    merge_generated,
    needing_one,
    require_one_expert,
    select_rows,
    special_tokens,
)
from freemoe.domain_experts.hosting.host import ExpertHost
from freemoe.models.mixed.cost import worth_mixing
from freemoe.models.mixed.rows import rows_by_key
from freemoe.models.mixed.running import Strategy

Several = Literal["auto", "swap", "grouped", "scratch", "fused"]
STRATEGIES: tuple[Several, ...] = ("auto", "swap", "grouped", "scratch", "fused")
"""How a batch of several experts is run."""


def require_strategy(strategy: str) -> None:
    """Raise unless there is such a strategy.

    Raises:
        RecipeError: With those that there are.
    """
    if strategy not in STRATEGIES:
        raise RecipeError(f"Unknown strategy {strategy!r} for several experts. Allowed: {', '.join(STRATEGIES)}.")


@contextmanager
def _try_mixed(host: ExpertHost, names: Sequence[str], strategy: Several, rows: int, must: bool) -> Iterator[bool]:
    """Inside, one forward pass runs all experts if this is True; else each has to be run by itself.

    ``rows`` are those that most linears are given at once; with ``must``, ``auto`` runs all in one pass where it can, as
    calls of their own do not give what is asked for.
    """
    with ExitStack() as stack:
        mixing = strategy not in ("swap", "grouped")
        if strategy == "auto":
            mixing = must or worth_mixing(host.mixable(), rows)
        if mixing:
            try:
                stack.enter_context(host.mixed(cast("Strategy", strategy))).assign(names)
            except DataError:
                stack.close()
                if strategy != "auto":
                    raise
                mixing = False
        yield mixing


def _group_rows(names: Sequence[str], strategy: Several) -> list[tuple[str, list[int]]]:
    """Which sequences are run together, where experts are not."""
    return [(name, [row]) for row, name in enumerate(names)] if strategy == "swap" else list(rows_by_key(names).items())


def forward_several(host: ExpertHost, inputs: dict[str, Any], names: Sequence[str], strategy: Several) -> Any:
    """A base's forward, every sequence under its own expert. ``names``: one expert per sequence.

    Raises:
        DataError: A base or an expert that cannot be mixed; or an input that works for one expert only, where each is run by
            itself.
    """
    size = next(v.shape[:2].numel() for k in ("input_ids", "inputs_embeds") if (v := inputs.get(k)) is not None)
    alone = needing_one(inputs, FORWARD_ALONE)
    with _try_mixed(host, names, strategy, size, bool(alone)) as mixing:
        if mixing:
            return host.model(**inputs)
    require_one_expert(alone, len(set(names)))
    parts: list[tuple[list[int], Tensor]] = []
    for name, rows in _group_rows(names, strategy):
        with host.expert(name):
            out = host.model(**{**select_rows(inputs, rows, len(names)), "use_cache": False})
        parts.append((rows, out.logits))
    logits = torch.cat([part for _, part in parts])
    order = torch.tensor([row for rows, _ in parts for row in rows], device=logits.device)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(logits=logits[order.argsort()])  # type: ignore[arg-type]


def generate_several(host: ExpertHost, inputs: dict[str, Any], names: Sequence[str], strategy: Several) -> Any:
    """A base's generate, every sequence under its own expert; arguments and errors are those of `forward_several`."""
    asked = {**vars(inputs.get("generation_config") or host.model.generation_config), **inputs}
    alone = needing_one(asked, GENERATE_ALONE)
    # Almost all passes of a generation have one row per sequence.
    with _try_mixed(host, names, strategy, batch_size(inputs), bool(alone)) as mixing:
        if mixing:
            return host.model.generate(**inputs)
    require_one_expert(alone, len(set(names)))
    pad, ends = special_tokens(host.model, inputs)
    outs: list[tuple[list[int], Tensor]] = []
    for name, rows in _group_rows(names, strategy):
        with host.expert(name):
            outs.append((rows, host.model.generate(**select_rows(inputs, rows, len(names)))))
    return merge_generated(outs, pad if pad is not None else next(iter(ends), None))
