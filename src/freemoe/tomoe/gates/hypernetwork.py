"""Everything that is trained: one hypernetwork for all layers, and a router and decoders per layer (ToMoE Sec. 3.2-3.3).

The base model's weights are in here nowhere. What the hypernetwork says of a layer is a handful of logits; how logits
become masks is `gating`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freemoe.models.sublayers import DecoderSublayers
from freemoe.tomoe.recipe import ConvertRecipe

# The paper's sizes (Tab. 8).
INPUT, RECURRENT = 32, 64
EMBEDDING = 2 * RECURRENT


@dataclass(frozen=True, eq=False)
class LayerLogits:
    """What the hypernetwork says of one layer in one step."""

    qk: Tensor  # (bits,), the static logits of the rotary bits
    value_embedding: Tensor  # (e,), the mean of the attention's expert embeddings
    mlp_embedding: Tensor  # (experts, e)
    mlp: Tensor  # (experts, width), a logit per neuron and expert
    heads: Tensor | None = None  # (kv_heads,), static logits of whole heads; None where dimensions are pruned


class AttentionGates(nn.Module):
    """Proj_E and Proj_D of one attention sublayer; one layer norm is shared by the two halves of Proj_D."""

    def __init__(self, layer: DecoderSublayers, heads: bool = False) -> None:
        super().__init__()
        self.head_dim = layer.rotary.head_dim
        self.project = nn.Linear(layer.hidden_size, EMBEDDING, bias=False)
        self.norm = nn.LayerNorm(EMBEDDING)
        self.decode = nn.Linear(EMBEDDING, self.head_dim + layer.rotary.num_bits, bias=False)
        # What the statistics begin with; zero in the paper.
        self.offset = nn.Parameter(torch.zeros(self.head_dim + layer.rotary.num_bits))
        self.decode_heads = nn.Linear(EMBEDDING, layer.kv_heads, bias=False) if heads else None

    def heads(self, embedding: Tensor) -> Tensor | None:
        """Embedding (e,) -> (kv_heads,), where whole heads are pruned."""
        return None if self.decode_heads is None else self.decode_heads(F.gelu(self.norm(embedding)))

    def qk(self, embedding: Tensor) -> Tensor:
        """Logits (bits,) of query and key dimensions, from the embedding (e,)."""
        return (
            F.linear(F.gelu(self.norm(embedding)), self.decode.weight[self.head_dim :]) + self.offset[self.head_dim :]
        )

    def values(self, x: Tensor, embedding: Tensor, local: bool = True) -> Tensor:
        """The attention's input (..., hidden) -> logits of value dimensions (..., head_dim), of each token or of all."""
        embedded = self.project(x.float()) + embedding if local else embedding.expand(*x.shape[:-1], -1)
        own = self.decode.weight[: self.head_dim]
        return F.linear(F.gelu(self.norm(embedded)), own) + self.offset[: self.head_dim]


class MlpGates(nn.Module):
    """Router and Proj_D of one MLP sublayer."""

    def __init__(self, layer: DecoderSublayers, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(layer.hidden_size, experts, bias=True)
        nn.init.zeros_(self.router.bias)
        self.norm = nn.LayerNorm(EMBEDDING)
        self.decode = nn.Linear(EMBEDDING, layer.intermediate_size, bias=False)
        self.offset = nn.Parameter(torch.zeros(experts, layer.intermediate_size))

    def table(self, embedding: Tensor) -> Tensor:
        """Embeddings (experts, e) -> (experts, width)."""
        return F.linear(F.gelu(self.norm(embedding)), self.decode.weight) + self.offset

    def tokens(self, embedding: Tensor, chosen: Tensor) -> Tensor:
        """Routed embeddings (..., e) and one-hot choices (..., experts) -> (..., width)."""
        return F.linear(F.gelu(self.norm(embedding)), self.decode.weight) + chosen @ self.offset


class Hypernetwork(nn.Module):
    """A bidirectional GRU over all sublayers (attention 0, MLP 0, attention 1, ...), the experts being its batch.

    Its input z is trained (the authors' code) or fixed (the paper), as the recipe says. Where gates begin at the statistics,
    decoders begin at zero, so that the offsets alone speak at first. torch's own state of random numbers is left as it was.
    """

    def __init__(self, sublayers: Sequence[DecoderSublayers], recipe: ConvertRecipe) -> None:
        super().__init__()
        gates, heads = recipe.gates, recipe.gates.attention == "heads"
        self.expert_embedding = gates.expert_embedding
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            z = torch.randn(2 * len(sublayers), recipe.experts, INPUT)
            self.z = nn.Parameter(z, requires_grad=gates.train_inputs)
            self.gru = nn.GRU(INPUT, RECURRENT, bidirectional=True)
            self.attention = nn.ModuleList(AttentionGates(layer, heads) for layer in sublayers)
            self.mlp = nn.ModuleList(MlpGates(layer, recipe.experts) for layer in sublayers)
        if gates.start == "statistics":
            for module in (*self.attention, *self.mlp):
                nn.init.zeros_(module.decode.weight)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]

    def forward(self) -> list[LayerLogits]:
        """The logits of every layer; they depend on nothing but the trained numbers."""
        embeddings, _ = self.gru(self.z)
        found = []
        for number, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            values, own = embeddings[2 * number].mean(dim=0), embeddings[2 * number + 1]
            if not self.expert_embedding:
                values = torch.zeros_like(values)
            found.append(
                LayerLogits(attention.qk(values), values, own, mlp.table(own), attention.heads(values))  # pyright: ignore
            )
        return found
