"""The gates of a converted layer as functions of tensors: which value dimensions, and which expert, a token uses.

They compute in float32 whatever the model's precision: a rounded score would choose otherwise. A converted model's own
code (`tomoe.modeling`) and the masks on the dense model (`tomoe.structures.masked`) call the very same functions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def value_scores(
    x: Tensor,
    project: Tensor,
    embedding: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    decode: Tensor,
    offset: Tensor,
) -> Tensor:
    """How much each token wants each value dimension: D(GELU(LN(x P + E))) (ToMoE Eq. 3 and 4).

    Args:
        x: (..., hidden), the attention's input.
        project: (e, hidden), Proj_E.
        embedding: (e,), the mean of the sublayer's expert embeddings.
        norm_weight: (e,).
        norm_bias: (e,).
        decode: (head_dim, e), the rows of Proj_D for V and O.
        offset: (head_dim,), added to every token's scores.

    Returns:
        (..., head_dim) float32.
    """
    embedded = F.linear(x.float(), project.float(), embedding.float())
    normed = F.layer_norm(embedded, (embedded.shape[-1],), norm_weight.float(), norm_bias.float())
    return F.linear(F.gelu(normed), decode.float(), offset.float())


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """One at the ``k`` largest scores of every row, zero elsewhere: exactly k, ties included.

    Args:
        scores: (..., n).
        k: 1 to n.

    Returns:
        (..., n) of the scores' type.
    """
    if k >= scores.shape[-1]:
        return torch.ones_like(scores)
    return torch.zeros_like(scores).scatter(-1, scores.topk(k, dim=-1, sorted=False).indices, 1.0)


def route_tokens(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The expert of every token: argmax of the router (ToMoE Eq. 5 without noise).

    Args:
        x: (..., hidden), the MLP's input.
        weight: (experts, hidden).
        bias: (experts,).

    Returns:
        (...) int64.
    """
    return F.linear(x.float(), weight.float(), bias.float()).argmax(dim=-1)
