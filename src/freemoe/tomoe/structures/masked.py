"""A structure as masks on the dense model (ToMoE Eq. 17, "pseudo-MoE"): the slow, obvious form of a conversion.

Masks are put on by hooks on the family's own linears, so that any family, any attention and any cache do what they do
anyway. Every other form must equal this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from freemoe.kernels.gates import route_tokens
from freemoe.models.hooks import combined_hooks, forward_hook, forward_pre_hook
from freemoe.models.sublayers import DecoderSublayers, find_sublayers
from freemoe.tomoe.structures.structure import LayerStructure, Structure, require_structure_fits


@contextmanager
def apply_structure(
    model: nn.Module, structure: Structure, sublayers: Sequence[DecoderSublayers] | None = None
) -> Iterator[None]:
    """While open, the model computes as converted; its weights are not touched, and afterwards it is as before.

    Raises:
        DataError: The structure does not fit the model.
    """
    sublayers = find_sublayers(model) if sublayers is None else sublayers
    require_structure_fits(structure, sublayers)
    with ExitStack() as stack:
        for layer, kept in zip(sublayers, structure, strict=True):
            # Once, and not in every pass.
            own = kept.to_device(layer.q.weight.device)
            stack.enter_context(mask_attention(layer, own.qk.float(), own.value_mask, own.heads))
            stack.enter_context(_mask_mlp(layer, own))
        yield


def mask_attention(
    layer: DecoderSublayers,
    bits: Tensor,
    mask_values: Callable[[Tensor], Tensor],
    heads: Tensor | None = None,
    mask_output: bool = True,
) -> AbstractContextManager[None]:
    """While open, a layer's attention computes with masks.

    ``bits`` are of queries and keys, ``heads`` (kv_heads,) those that are kept. ``mask_values`` makes of a layer's input
    (..., hidden) the mask of its value dimensions, for all tokens or each; with ``mask_output`` what the output projection
    reads is masked as well.
    """
    head_dim, kept = layer.rotary.head_dim, layer.rotary.expand_bits(bits)
    now: dict[str, Tensor] = {}

    def on_queries(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return per_head(output, kept, head_dim)

    def on_input(module: nn.Module, args: Any) -> None:
        now["mask"] = mask_values(args[0])

    def on_values(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return per_head(output, now["mask"], head_dim)

    def on_output(module: nn.Module, args: Any) -> tuple[Tensor, ...] | None:
        mask = now.pop("mask")
        if not mask_output:
            return None
        output = per_head(args[0], mask, head_dim)
        return (output if heads is None else by_head(output, heads), *args[1:])

    return combined_hooks(
        forward_hook(layer.q, on_queries),
        forward_hook(layer.k, on_queries),
        forward_pre_hook(layer.v, on_input),
        forward_hook(layer.v, on_values),
        forward_pre_hook(layer.o, on_output),
    )


def _mask_mlp(layer: DecoderSublayers, structure: LayerStructure) -> AbstractContextManager[None]:
    seen: dict[str, Tensor] = {}

    def on_input(module: nn.Module, args: Any) -> None:
        seen["mask"] = structure.experts[route_tokens(args[0], structure.router_weight, structure.router_bias)]

    def on_down(module: nn.Module, args: Any) -> tuple[Tensor, ...]:
        return (args[0] * seen.pop("mask").to(args[0].dtype), *args[1:])

    return combined_hooks(forward_pre_hook(layer.up[0], on_input), forward_pre_hook(layer.down, on_down))


def per_head(states: Tensor, mask: Tensor, head_dim: int) -> Tensor:
    """Mask every head of (..., heads * head_dim) by (head_dim,) or by a mask of its own per token (..., head_dim)."""
    heads = states.unflatten(-1, (-1, head_dim))
    mask = mask.to(states.dtype)
    return (heads * (mask if mask.ndim == 1 else mask.unsqueeze(-2))).flatten(-2)


def by_head(states: Tensor, heads: Tensor) -> Tensor:
    """Mask whole heads of (..., heads * head_dim) by (kv_heads,), each for all query heads that it serves."""
    grouped = states.unflatten(-1, (len(heads), -1))
    return (grouped * heads.to(states.dtype).unsqueeze(-1)).flatten(-2)
