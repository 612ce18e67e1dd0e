"""Whether an exported model computes what the masks on the dense one do, layer by layer on the same inputs.

Held against each other as a whole, two models that are the same part at one near-tie: a router's two best experts differ in the
last bits, one token takes the other expert, and every token behind it sees that. So each exported layer is given the masked
model's own input, and its output compared token by token; a wrong export is wrong for many tokens of a layer, a near-tie for
single ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.errors import NumericError
from freemoe.models.hooks import combined_hooks, forward_hook, forward_pre_hook

SAME = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of a token's output, over the layer's largest output (or 1)."""

FLIPPED = 0.02
"""Share of a layer's tokens that may differ by more, or one token where that is less."""


@torch.no_grad()
def layer_inputs(model: Any, paths: Sequence[str], ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """What every layer is given, each ``(batch, tokens, hidden)``, and the logits ``(batch, tokens, vocabulary)``.

    ``ids``: (batch, tokens), of the dense model with the masks on.
    """
    seen: list[Tensor] = []

    def capture_input(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].detach().clone())

    with combined_hooks(*(forward_pre_hook(model.get_submodule(path), capture_input) for path in paths)):
        logits = model(ids, use_cache=False).logits
    return seen, logits


@torch.no_grad()
def mismatch_shares(
    exported: Any, paths: Sequence[str], ids: Tensor, inputs: Sequence[Tensor], logits: Tensor
) -> list[float]:
    """Share of tokens for which each layer's output, of the last one the logits, is not the same.

    ``inputs`` and ``logits`` are those of `layer_inputs`; ``ids``: (batch, tokens).
    """
    shares: list[float] = []
    wanted = [*inputs[1:], logits]

    def replace_input(number: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[number].to(args[0].device), *args[1:])

    def compare_output(number: int, module: nn.Module, args: Any, output: Any) -> None:
        shares.append(_mismatch_share(output[0] if isinstance(output, tuple) else output, wanted[number]))

    layers = [exported.get_submodule(path) for path in paths]
    given = [forward_pre_hook(layer, partial(replace_input, number)) for number, layer in enumerate(layers)]
    seen = [forward_hook(layer, partial(compare_output, number)) for number, layer in enumerate(layers[:-1])]
    with combined_hooks(*given, *seen):
        found = exported(ids, use_cache=False).logits
    return [*shares, _mismatch_share(found, logits)]


def _mismatch_share(actual: Tensor, wanted: Tensor) -> float:
    allowed = SAME[wanted.dtype] * max(1.0, float(wanted.abs().max()))
    difference = (actual.float() - wanted.to(actual.device).float()).abs().amax(-1)
    return float((~(difference <= allowed)).float().mean())  # NaN is no agreement


def require_agreement(shares: Sequence[float], tokens: int) -> None:
    """Raise where a layer differs for more tokens than near-ties explain. ``shares`` are those of `mismatch_shares`.

    Raises:
        NumericError: With the layer and the share.
    """
    for number, share in enumerate(shares):
        if share > max(FLIPPED, 1 / tokens) + 1e-9:
            raise NumericError(
                f"Layer {number} of the exported model computes otherwise than the masks on the dense one for {share:.1%} of "
                f"{tokens:,} tokens; near-ties of routers explain {FLIPPED:.0%}. This is a mistake of freemoe's: please report it."
            )
