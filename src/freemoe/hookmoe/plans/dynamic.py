"""Baselines that choose k per token: top-p, relative threshold, NAEE; each also with a linear ramp over layers.

All three look at the k router weights of a token, normalised over the k and never assumed to be sorted. At k = 2 they are
one family on the ratio q = w2 / w1: top-p keeps the second expert iff q > 1/p - 1, the other two iff q >= threshold.
Shapes: (n, k) for n tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.errors import RecipeError
from freemoe.evals.engine.output_head import forward_blocks
from freemoe.hookmoe.plans.compact import use_compact_experts
from freemoe.hookmoe.plans.layers import MoELayer, moe_layers
from freemoe.models.hooks import combined_hooks, forward_hook, forward_pre_hook
from freemoe.models.spec import family_of
from freemoe.text.blocks import PackedBlocks

RULES = ("top_p", "rel_threshold", "naee")


def normalise_weights(weights: Tensor) -> Tensor:
    """(n, k) router weights that sum to one per token."""
    return weights.float() / weights.float().sum(-1, keepdim=True)


def shares_before(weights: Tensor) -> Tensor:
    """For every slot the sum of the weights above it: (n, k), 0 for the heaviest."""
    ordered, slot = normalise_weights(weights).sort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(ordered).scatter(-1, slot, ordered.cumsum(-1) - ordered)


def weight_ratios(weights: Tensor) -> Tensor:
    """Every weight over its token's largest: (n, k)."""
    return weights.float() / weights.float().amax(-1, keepdim=True)


def kept_slots(rule: str, weights: Tensor, threshold: float) -> Tensor:
    """(n, k) bool: which experts a rule keeps; the heaviest always.

    ``top_p``: while the sum above a slot is below p (Huang et al. 2024, over the renormalised top k).
    ``rel_threshold``: at least tau of the largest (after D2DMoE, on router weights). ``naee``: the same with a threshold per
    layer, the median over calibration tokens (Lu et al. 2024, who have k = 2).
    """
    if rule == "top_p":
        return (shares_before(weights) < threshold) | (shares_before(weights) == 0)
    if rule in ("rel_threshold", "naee"):
        return weight_ratios(weights) >= min(threshold, 1.0)
    raise RecipeError(f"Unknown rule {rule!r}; known: {', '.join(RULES)}.")


def ramp_thresholds(
    rule: str, start: float, layers: Sequence[int], span: float = 0.0, total: int | None = None
) -> dict[int, float]:
    """Thresholds of all layers: p - span L / N, or tau + span L / N, so that upper layers run fewer experts.

    ``total`` is N, all decoder layers (the last mixture layer + 1 if absent); the paper's span is 0.2.
    """
    sign = -1.0 if rule == "top_p" else 1.0
    total = total or max(layers) + 1
    return {n: start + sign * span * n / total for n in layers}


def threshold_for(rule: str, weights: Tensor, act: float) -> float:
    """The threshold at which a rule runs ``act`` experts per token on these router weights: a quantile of its statistic.

    ``weights``: (n, k), seen on calibration text; ``act`` is between 1 and k.

    Raises:
        RecipeError: An Act that k experts cannot give.
    """
    k = weights.shape[-1]
    if not 1 <= act <= k:
        raise RecipeError(f"act is {act:g}; a rule over the {k} experts of a token can give 1 to {k}.")
    statistic = shares_before(weights) if rule == "top_p" else weight_ratios(weights)
    # The heaviest slot of every token always runs; the others run in the order of the statistic.
    others = statistic.sort(dim=-1, descending=rule != "top_p").values[:, 1:].flatten().sort().values
    wanted = (act - 1) / max(1, k - 1)
    if rule == "top_p":
        at = round(wanted * len(others))
        return 1.0 + 1e-6 if at >= len(others) else float(others[at])
    at = len(others) - round(wanted * len(others))
    return 1.0 if at >= len(others) else float(others[at])


@torch.no_grad()
def router_weights(model: Any, blocks: PackedBlocks) -> dict[int, Tensor]:
    """Layer -> (tokens, k) router weights over a text, on the CPU."""
    seen: dict[int, list[Tensor]] = {}

    def record_weights(number: int, module: nn.Module, args: Any, output: Any) -> None:
        seen.setdefault(number, []).append(output[1].float().cpu())

    with combined_hooks(*(forward_hook(m.gate, partial(record_weights, m.number)) for m in moe_layers(model))):
        for batch in blocks.iter_batches():
            forward_blocks(model, batch)
    return {n: torch.cat(parts) for n, parts in seen.items()}


def tune_thresholds(rule: str, weights: Mapping[int, Tensor], act: float) -> dict[int, float]:
    """Thresholds per layer at which every layer runs ``act`` experts per token on calibration text."""
    return {n: threshold_for(rule, w, act) for n, w in weights.items()}


def naee_thresholds(weights: Mapping[int, Tensor]) -> dict[int, float]:
    """Per layer the median of w2 / w1 over tokens (of all lighter slots over the heaviest, at larger k)."""
    return {n: float(weight_ratios(w).sort(dim=-1, descending=True).values[:, 1:].median()) for n, w in weights.items()}


@contextmanager
def apply_rule(
    model: Any, rule: str, thresholds: Mapping[int, float], skip: bool = True
) -> Iterator[dict[int, list[int]]]:
    """While open, tokens run as many experts as a rule says; yields counts that fill as the model runs.

    What is kept is scaled to the sum of all where the model's own router renormalises, and left as it is elsewhere.

    Args:
        model: A mixture model.
        rule: One of ``RULES``.
        thresholds: Of every mixture layer.
        skip: Dropped experts are really left out (`compact`); else they have weight zero, which costs the same as running.

    Yields:
        Layer -> [executed pairs, tokens].
    """
    layers, renorm = moe_layers(model), router_renormalises(model)
    counts = {layer.number: [0, 0] for layer in layers}

    def drop_in_layer(layer: MoELayer) -> AbstractContextManager[None]:
        count, order = counts[layer.number], list[Tensor]()

        def record_order(gate: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            order[:] = [layer.choice_order(*output)]

        def drop_slots(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, index, weights, *more = args
            keep = kept_slots(rule, weights, thresholds[layer.number])
            if order:
                keep = first_chosen(order.pop().reshape(keep.shape), keep.sum(-1))
            count[0] += int(keep.sum())
            count[1] += len(keep)
            kept = weights * keep
            if renorm:
                kept = kept * (weights.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True))
            # An index beyond the last expert marks a slot that is left out.
            index = index.masked_fill(~keep, layer.count) if skip else index
            return hidden, index, kept.to(weights.dtype), *more

        corrected = [forward_hook(layer.gate, record_order)] if layer.correction is not None else []
        return combined_hooks(*corrected, forward_pre_hook(layer.experts, drop_slots))

    with use_compact_experts(model) if skip else nullcontext(), combined_hooks(*map(drop_in_layer, layers)):
        yield counts


def first_chosen(order: Tensor, many: Tensor) -> Tensor:
    """(n, k) bool: of every token as many slots as are asked for, those that its gate chose first.

    A rule says by weight how many experts run; which ones is the gate's own choice, as at a smaller k. ``order``: (n, k),
    the first choice largest; ``many``: (n,) int64.
    """
    place = order.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return place < many[:, None]


def act_of(counts: Mapping[int, Sequence[int]]) -> float:
    """Executed pairs per token and layer, from what `apply_rule` counted."""
    return sum(c[0] / c[1] for c in counts.values()) / len(counts)


def router_renormalises(model: Any) -> bool:
    """Whether the model's own router makes the weights of its k slots sum to one."""
    gate = family_of(model).gate
    if gate is None or gate.renormalised == "never":
        return False
    return gate.renormalised == "always" or bool(getattr(model.config.get_text_config(), gate.renormalised, False))
