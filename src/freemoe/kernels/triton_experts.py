"""The experts on a GPU: kernels that gather an expert's rows as they multiply them.

Tokens are sorted by expert on the device, and a launch has as many blocks of tokens as there could be at the most, so
that nothing waits for the host: a block looks its expert up in a table, and blocks beyond the last return at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freemoe.kernels.experts import MLPWeights, masked_by_lists
from freemoe.kernels.optional import INTERPRETED, falls_back_to, triton_takes
from freemoe.kernels.rows import ACTIVATIONS

TOKENS, NEURONS, INNER = 32, 64, 32
"""Sizes of a block: of tokens, of columns of the result, of what is summed over."""


def triton_available(x: Tensor, weights: MLPWeights) -> bool:
    """Whether the kernels take these: where `x` is, of their common type, with this activation."""
    known = weights.name in ACTIVATIONS and x.dtype == weights.up.dtype
    return known and triton_takes(x.dtype, x.device.type)


def token_blocks(expert: Tensor, experts: int, size: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort tokens by expert and cut each expert's into blocks, without waiting for the device.

    Args:
        expert: (T,) int64.
        experts: N.
        size: Tokens of a block.

    Returns:
        ``order`` (T,), the tokens sorted by expert; and per block, (T // size + N,) each: its expert, or -1 where there
        is no block; its first place in ``order``; the place after its expert's last token.
    """
    order = expert.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=expert.device)
    counts = counts.scatter_add(0, expert, torch.ones_like(expert))
    ends = counts.cumsum(0)
    whole = (counts + size - 1) // size
    last = whole.cumsum(0)
    number = torch.arange(len(expert) // size + experts, device=expert.device)
    owner = torch.searchsorted(last, number, right=True)
    known = owner.clamp(max=experts - 1)
    begin = (ends - counts)[known] + (number - (last - whole)[known]) * size
    return order, torch.where(owner < experts, owner, -1), begin, ends[known]


@falls_back_to(masked_by_lists)
def triton_experts(x: Tensor, expert: Tensor, weights: MLPWeights, index: Tensor) -> Tensor:
    """Every token through the rows of its expert, as ``experts.reference_experts``; no gradients.

    Args:
        x: (T, d).
        expert: (T,) int64.
        weights: Of the layer.
        index: (N, w) int32 rows, -1 where a list is short.

    Returns:
        (T, d).
    """
    # Not `import triton_loops`: an exported folder's code is found by the names that are taken from a module.
    from freemoe.kernels.triton_loops import multiply_down as multiply_down
    from freemoe.kernels.triton_loops import multiply_up as multiply_up

    parts, neurons, d = weights.up.shape
    experts, widest = index.shape
    order, owner, begin, end = token_blocks(expert, experts)
    widths = (index >= 0).sum(dim=1)
    hidden = torch.empty(len(x), widest, dtype=x.dtype, device=x.device)
    output = torch.empty_like(x)
    settings = {"UPCAST": INTERPRETED, "T": TOKENS, "C": NEURONS, "K": INNER}
    table = (order, owner, begin, end, index, widths)
    x, up, down = x.contiguous(), weights.up.contiguous(), weights.down.contiguous()
    up_bias, down_bias = weights.up_bias, weights.down_bias
    kind = ACTIVATIONS[weights.name]
    multiply_up[(len(owner), -(-widest // NEURONS))](
        x, *table, up, up if up_bias is None else up_bias, hidden, d, neurons, widest,
        PARTS=parts, KIND=kind, BIAS=up_bias is not None, **settings,
    )  # fmt: skip
    multiply_down[(len(owner), -(-d // NEURONS))](
        hidden, *table, down, down if down_bias is None else down_bias, output, d, widest,
        BIAS=down_bias is not None, **settings,
    )  # fmt: skip
    return output
