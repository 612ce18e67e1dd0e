"""Gates in training: masks with gradients, put on the dense model by hooks (ToMoE Eq. 2-6).

Noise is drawn from a generator of its own for every step and site, so that a layer that is computed again in the
backward pass (gradient checkpointing) draws the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.models.hooks import combined_hooks, forward_pre_hook
from freemoe.models.sublayers import DecoderSublayers
from freemoe.tomoe.gates.budget import LayerWidths
from freemoe.tomoe.gates.hypernetwork import Hypernetwork, LayerLogits
from freemoe.tomoe.gates.losses import mask_union
from freemoe.tomoe.recipe import ConvertRecipe
from freemoe.tomoe.structures.masked import by_head, mask_attention
from freemoe.training.straight_through import (
    MEDIAN_NOISE,
    gumbel_probabilities,
    gumbel_sigmoid,
    gumbel_softmax,
    hard_top_k,
)


@dataclass
class LayerMasks:
    """The masks of one layer in one step, and below what its tokens did with them: that the forward pass fills in."""

    logits: LayerLogits  # What they are drawn of
    qk: Tensor  # (bits,) of zeros and ones, with gradients
    mlp: Tensor  # (experts, width)
    heads: Tensor | None  # (kv_heads,), or None where dimensions are pruned
    value_width: int | None  # Value dimensions that every token keeps; None where thresholds decide
    value_counts: Any = None  # (tokens,), kept value dimensions of each token, with a gradient
    value_scores: Any = None  # (tokens, head_dim), above 0 where a dimension is kept; outside of training
    value_union: Tensor | None = None  # (head_dim,), which value dimensions some token keeps, with a gradient
    chosen: Tensor | None = None  # (tokens, experts), one-hot, with a gradient
    probabilities: Tensor | None = None  # (tokens, experts), the router's softmax, or Gumbel-softmax


class _ExpertMask(torch.autograd.Function):
    """a * S[expert of the token]: one mask at the input of the down projection.

    Keeps the activation, the choice and the table, and no (tokens, width) mask. The gradient of the table sees what a
    dropped neuron would have given, so that it can come back.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, chosen: Tensor, table: Tensor) -> Tensor:
        expert = chosen.argmax(dim=-1)
        ctx.save_for_backward(a, expert, table)
        return a * table.to(a.dtype)[expert]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, expert, table = ctx.saved_tensors
        (grad,) = grads
        value = (grad * a).to(table.dtype)
        by_expert = torch.zeros_like(table).index_add_(0, expert, value)
        return grad * table.to(grad.dtype)[expert], value @ table.T, by_expert


@dataclass(eq=False)
class GateSampler:
    """How logits become masks, by a recipe.

    Tokens of processes of another ``rank`` draw other noise, masks that all share draw the same.
    """

    sublayers: Sequence[DecoderSublayers]
    recipe: ConvertRecipe
    rank: int = 0

    def noise_generator(
        self, step: int | None, site: int, device: torch.device, rank: int = 0
    ) -> torch.Generator | None:
        """The generator of one site in one step; None where there is no noise (or no step: evaluation)."""
        if step is None or not self.recipe.gates.noise:
            return None
        # Large odd factors keep the seeds of neighbouring steps and sites apart.
        number = ((self.recipe.seed * 1_000_003 + step) * 8_191 + site) * 1_009 + rank
        return torch.Generator(device=device).manual_seed(number % (2**63))

    def sample_masks(
        self, logits: Sequence[LayerLogits], widths: Sequence[LayerWidths] | None, step: int | None
    ) -> list[LayerMasks]:
        """The masks that all tokens share, by layer."""
        made = []
        for layer, own in enumerate(logits):
            width = widths[layer] if widths is not None else None
            noise = [self.noise_generator(step, 5 * layer + kind, own.qk.device) for kind in (0, 1)]
            bits = self._sample_mask(own.qk, width.qk if width else None, noise[0])
            heads = None if own.heads is None else self._sample_mask(own.heads, None, noise[0])
            pruned = self.recipe.gates.query_masks and heads is None
            neurons = self._sample_mask(own.mlp, width.mlp if width else None, noise[1])
            made.append(
                LayerMasks(own, bits if pruned else torch.ones_like(bits), neurons, heads, width.vo if width else None)
            )
        return made

    def _sample_mask(self, logits: Tensor, k: int | None, noise: torch.Generator | None) -> Tensor:
        gates = self.recipe.gates
        if k is not None:
            return hard_top_k(logits, k, gates.temperature, noise)
        return gumbel_sigmoid(logits, gates.offset, gates.temperature, noise)

    @contextmanager
    def apply_masks(self, hypernetwork: Hypernetwork, made: Sequence[LayerMasks], step: int | None) -> Iterator[None]:
        """While open, the dense model computes with the step's masks; the backward pass must happen inside too."""
        with ExitStack() as stack:
            for layer, gates, mlp, masks in zip(
                self.sublayers, hypernetwork.attention, hypernetwork.mlp, made, strict=True
            ):
                stack.enter_context(self._mask_attention(layer, gates, masks, step))
                stack.enter_context(self._mask_mlp(layer, mlp, masks, step))
            yield

    def _mask_attention(
        self, layer: DecoderSublayers, gates: Any, masks: LayerMasks, step: int | None
    ) -> AbstractContextManager[None]:
        recipe, losses = self.recipe.gates, self.recipe.losses
        if masks.heads is not None:
            return _mask_whole_heads(layer, masks.heads, masks)

        def mask_values(x: Tensor) -> Tensor:
            local = recipe.local_embedding and recipe.value_masks == "tokens"
            scores = gates.values(x, masks.logits.value_embedding, local)
            static = recipe.value_masks == "static"
            # One choice for all tokens has one draw, in every process the same (ToMoE Eq. 5, s_0).
            noise = self.noise_generator(step, 5 * layer.number + 2, scores.device, 0 if static else self.rank)
            drawn = self._sample_mask(scores.flatten(0, -2)[:1] if static else scores, masks.value_width, noise)
            mask = drawn.expand_as(scores)
            if step is None:
                masks.value_scores = scores.flatten(0, -2) + recipe.offset + MEDIAN_NOISE
            masks.value_counts = mask.sum(dim=-1).flatten()
            if losses.union_attention and losses.union > 0:
                masks.value_union = mask_union(drawn.flatten(0, -2))
            return mask

        return mask_attention(layer, masks.qk, mask_values, mask_output=recipe.mask_output)

    def _mask_mlp(
        self, layer: DecoderSublayers, gates: Any, masks: LayerMasks, step: int | None
    ) -> AbstractContextManager[None]:
        recipe, table = self.recipe.gates, masks.mlp
        now: dict[str, Tensor] = {}

        def on_input(module: nn.Module, args: Any) -> None:
            logits = gates.router(args[0].float())
            noise = self.noise_generator(step, 5 * layer.number + 3, logits.device, self.rank)
            now["chosen"] = gumbel_softmax(logits, recipe.temperature, noise)
            masks.chosen = now["chosen"].flatten(0, -2)
            if self.recipe.losses.balance_form == "gumbel":  # with the draw of the choice
                again = self.noise_generator(step, 5 * layer.number + 3, logits.device, self.rank)
                probabilities = gumbel_probabilities(logits, recipe.temperature, again)
            else:
                probabilities = torch.softmax(logits, dim=-1)
            masks.probabilities = probabilities.flatten(0, -2)

        def on_down(module: nn.Module, args: Any) -> tuple[Tensor, ...]:
            chosen, a = now.pop("chosen"), args[0]
            if recipe.mlp_masks == "tokens":
                scores = gates.tokens(chosen @ masks.logits.mlp_embedding, chosen)
                noise = self.noise_generator(step, 5 * layer.number + 4, scores.device, self.rank)
                mask = gumbel_sigmoid(scores, recipe.offset, recipe.temperature, noise)
                a = a * (mask * mask if recipe.mask_twice else mask).to(a.dtype)
            else:
                rows = a.flatten(0, -2)
                masked = _ExpertMask.apply(rows, chosen.flatten(0, -2), table * table if recipe.mask_twice else table)
                a = masked.view_as(a)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            return (a, *args[1:])

        return combined_hooks(forward_pre_hook(layer.up[0], on_input), forward_pre_hook(layer.down, on_down))


def _mask_whole_heads(layer: DecoderSublayers, heads: Tensor, masks: LayerMasks) -> AbstractContextManager[None]:
    """Whole heads off: what they say is multiplied by zero, and nothing else of them matters."""

    def on_output(module: nn.Module, args: Any) -> tuple[Tensor, ...]:
        tokens = args[0].shape[:-1].numel()
        masks.value_counts = heads.new_full((tokens,), float(layer.rotary.head_dim))
        return (by_head(args[0], heads), *args[1:])

    return combined_hooks(forward_pre_hook(layer.o, on_output))
