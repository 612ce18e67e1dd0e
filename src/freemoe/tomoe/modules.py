"""The modules of a converted layer, which `modeling` puts in place of a family's own attention and MLP.

A copy of this file lies in every exported folder: it may import torch, transformers and ``freemoe.kernels`` alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from freemoe.kernels.attention import narrow_applies, narrow_causal
from freemoe.kernels.experts import (
    ExpertNeurons,
    MLPWeights,
    grouped_experts,
    masked_by_lists,
    masked_experts,
    rowwise_experts,
)
from freemoe.kernels.gates import route_tokens, top_k_mask, value_scores
from freemoe.kernels.rows import heads_sum, heads_times, rows_available
from freemoe.kernels.triton_experts import triton_available, triton_experts


def sparse_tokens(num_kept: int, width: int) -> int:
    """Up to so many tokens, each is multiplied by the value dimensions it keeps; beyond, all are computed and masked.

    Args:
        num_kept: Dimensions that a token keeps.
        width: Of how many.
    """
    return 64 if num_kept <= 0.6 * width else 16


class ValueGate(nn.Module):
    """Which value dimensions of a head a token uses (ToMoE Eq. 4), in float32.

    Args:
        hidden: Width of the residual stream.
        inner: Width of the experts' embedding.
        head_dim: Value dimensions of a head.
        keep: K, how many of them every token keeps.
    """

    def __init__(self, hidden: int, inner: int, head_dim: int, keep: int) -> None:
        super().__init__()
        self.keep = keep
        self.project = nn.Parameter(torch.empty(inner, hidden, dtype=torch.float32))
        self.embedding = nn.Parameter(torch.empty(inner, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.empty(inner, dtype=torch.float32))
        self.norm_bias = nn.Parameter(torch.empty(inner, dtype=torch.float32))
        self.decode = nn.Parameter(torch.empty(head_dim, inner, dtype=torch.float32))
        self.offset = nn.Parameter(torch.empty(head_dim, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., head_dim) float32 zeros and ones, K ones each."""
        return top_k_mask(value_scores(x, **dict(self.named_parameters())), self.keep)


class HeadNorm(nn.Module):
    """RMS norm of the kept dimensions of a head: the dropped ones count as zeros, so the mean is over all of them.

    Args:
        kept: Dimensions that are left.
        head_dim: Dimensions that the dense model has.
        eps: As in the dense model.
    """

    def __init__(self, num_kept: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_kept))
        self.head_dim = head_dim
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., kept) -> (..., kept)."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / self.head_dim + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class Rows(nn.Module):
    """A linear layer whose weight is stored transposed, (inputs, outputs): an input is a row.

    Args:
        inputs: Width of the input.
        outputs: Width of the output.
        bias: Whether there is one.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return F.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    """Comes before a family's attention class: fewer query and key dimensions, gated or fewer value dimensions."""

    # What the family's own class brings.
    config: Any
    layer_idx: int
    training: bool
    attention_dropout: float

    turned_index: Tensor
    query_mask: Tensor | None
    value_mask: Tensor | None

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # pyright: ignore[reportCallIssue]
        own, dense_dim = config.tomoe["layers"][layer_idx], config.tomoe["head_dim"]
        hidden = config.hidden_size
        # Folders of earlier versions have all heads.
        heads = own.get("heads", config.num_attention_heads)
        kv_heads = own.get("kv_heads", config.num_key_value_heads)
        self.scaling = config.tomoe["scale"]
        self.query_width, self.value_width, self.turned = own["query_width"], own["value_width"], own["turned"]
        biased = self.q_proj.bias is not None  # pyright: ignore
        last = self._modules.pop("dense", None) or self._modules["o_proj"]
        self.q_proj = nn.Linear(hidden, heads * self.query_width, biased)
        self.k_proj = nn.Linear(hidden, kv_heads * self.query_width, biased)
        self.v_proj = nn.Linear(hidden, kv_heads * self.value_width, biased)
        self.o_proj = Rows(heads * self.value_width, hidden, last.bias is not None)  # pyright: ignore
        for name in ("q_norm", "k_norm"):
            if name in self._modules:
                setattr(self, name, HeadNorm(self.query_width, dense_dim, config.rms_norm_eps))
        # Which of the rotary embedding's dimensions are left.
        self.register_buffer("turned_index", torch.arange(self.turned))
        self.value_gate = (
            ValueGate(hidden, own["gate_width"], self.value_width, own["value_keep"]) if own["gate_width"] else None
        )
        masks = config.tomoe["mode"] == "pseudo"
        self.register_buffer("query_mask", torch.ones(self.query_width, dtype=torch.bool) if masks else None)
        static = masks and self.value_gate is None
        self.register_buffer("value_mask", torch.ones(self.value_width, dtype=torch.bool) if static else None)
        window = getattr(self, "sliding_window", getattr(config, "sliding_window", None))
        self.options = {} if window is None else {"sliding_window": window}

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in transformers: (B, T, hidden) -> the same, and the attention's weights where they are known."""
        x = hidden_states
        queries = self._mask_and_norm(self.q_proj(x).unflatten(-1, (-1, self.query_width)), "q_norm").transpose(1, 2)
        keys = self._mask_and_norm(self.k_proj(x).unflatten(-1, (-1, self.query_width)), "k_norm").transpose(1, 2)
        cos, sin = (part.index_select(-1, self.turned_index) for part in position_embeddings)
        queries, keys = _apply_partial_rotary(queries, keys, cos, sin, self.turned)
        mask = self.value_mask if self.value_gate is None else self.value_gate(x)
        # Each token through its own rows, where compiled loops can do it; else through all rows and a mask.
        sparse = self.value_gate is not None and self._reads_rows(x)
        values = self._value_states(x, mask, sparse).transpose(1, 2)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        output, weights = self._attend(queries, keys, values, attention_mask, **kwargs)
        if not sparse:
            return self.o_proj(_per_head(output, mask).flatten(-2)), weights
        kept = mask.flatten(0, 1).bool()  # pyright: ignore[reportOptionalMemberAccess]
        summed = heads_sum(output.flatten(0, 1).flatten(1), kept, self.o_proj.weight).view_as(x)
        return (summed if self.o_proj.bias is None else summed + self.o_proj.bias), weights

    def _mask_and_norm(self, states: Tensor, norm: str) -> Tensor:
        states = _per_head(states, self.query_mask)
        return self._modules[norm](states) if norm in self._modules else states  # pyright: ignore

    def _value_states(self, x: Tensor, mask: Tensor | None, sparse: bool) -> Tensor:
        """(B, T, kv heads, value width), masked."""
        if sparse:
            kept = mask.flatten(0, 1).bool()  # pyright: ignore[reportOptionalMemberAccess]
            values = heads_times(x.flatten(0, 1), kept, self.v_proj.weight, self.v_proj.bias)
            return values.view(*x.shape[:-1], -1, self.value_width)
        return _per_head(self.v_proj(x).unflatten(-1, (-1, self.value_width)), mask)

    def _reads_rows(self, x: Tensor) -> bool:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.config.tomoe["mode"] == "pseudo":
            return False
        gate = self.value_gate
        limit = 0 if gate is None else sparse_tokens(gate.keep, self.value_width)
        if x.device.type != "cpu" or x.numel() > limit * x.shape[-1]:
            return False
        return rows_available(x.dtype)

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of (B, heads, T, query width) -> (B, T, heads, value width)."""
        name = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        width = max(self.query_width, self.value_width)
        free = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
        if free and name == "sdpa" and attention_mask is None and narrow_applies(queries, keys, values):
            return narrow_causal(queries, keys, values, self.scaling), None
        # Fused attention wants one width for all three, and zeros change nothing; one query is a plain product.
        if queries.shape[2] > 1 and name != "eager":
            queries, keys = (F.pad(t, (0, width - self.query_width)) for t in (queries, keys))
            values = F.pad(values, (0, width - self.value_width))
        dropout = self.attention_dropout if self.training else 0.0
        kwargs |= self.options
        output, weights = attend(
            self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return output[..., : self.value_width], weights


def _per_head(states: Tensor, mask: Tensor | None) -> Tensor:
    """Mask (B, T, heads, width) by (width,) or by (B, T, width)."""
    if mask is None:
        return states
    mask = mask.to(states.dtype)
    mask = mask if mask.ndim == 1 else mask.unsqueeze(-2)
    # Only ever of states that were just computed: where nobody looks back, they can be written over.
    return states * mask if torch.is_grad_enabled() else states.mul_(mask)


def _apply_partial_rotary(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, turned: int
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of the first ``turned`` dimensions of a head."""
    if turned == queries.shape[-1]:
        return apply_rotary_pos_emb(queries, keys, cos, sin)
    ahead = apply_rotary_pos_emb(queries[..., :turned], keys[..., :turned], cos, sin)
    behind = queries[..., turned:], keys[..., turned:]
    first, second = (torch.cat(halves, dim=-1) for halves in zip(ahead, behind, strict=True))
    return first, second


class MixtureMLP(nn.Module):
    """The MLP of a converted layer: a router and the experts' neurons, a neuron being a row of every matrix.

    Args:
        config: Of the converted model.
        layer_idx: Number of the layer.
        dense: The family's own MLP, which tells biases, parts and activation.
    """

    experts: Tensor
    activation: Any

    def __init__(self, config: Any, layer_idx: int, dense: nn.Module) -> None:
        super().__init__()
        own = config.tomoe["layers"][layer_idx]
        hidden, neurons, widths = config.hidden_size, own["neurons"], own["widths"]
        gated = "gate_proj" in dense._modules
        first, last = ("gate_proj", "down_proj") if gated else ("fc1", "fc2")
        self.mode, self.widths = config.tomoe["mode"], list(widths)
        self.activation = dense.act_fn if gated else dense.activation_fn
        self.activation_name = config.hidden_act
        self.router = nn.Linear(hidden, len(widths), dtype=torch.float32)
        self.up = nn.Parameter(torch.empty(1 + gated, neurons, hidden))
        self.down = nn.Parameter(torch.empty(neurons, hidden))
        biased = [dense._modules[name].bias is not None for name in (first, last)]  # pyright: ignore
        self.up_bias = nn.Parameter(torch.empty(1 + gated, neurons)) if biased[0] else None
        self.down_bias = nn.Parameter(torch.empty(hidden)) if biased[1] else None
        # (N, widest) rows of each expert; -1 where a list is short.
        self.register_buffer("experts", torch.zeros(len(widths), max(widths), dtype=torch.int32))
        self._plan: tuple[Any, ExpertNeurons] | None = None

    def fault(self) -> str | None:
        """What is wrong with the experts' lists or the router's numbers, in words; None where nothing is."""
        if self.experts.is_meta or self.router.weight.is_meta:
            return None
        kept = self.experts >= 0
        if int(self.experts.max()) >= len(self.down) or int(self.experts.min()) < -1:
            return f"an expert names neurons beyond the {len(self.down)} that are there"
        if kept.sum(1).tolist() != self.widths:
            return f"experts have {kept.sum(1).tolist()} neurons, and config.json says {self.widths}"
        scores = (self.router.weight, self.router.bias)
        return None if all(bool(torch.isfinite(t).all()) for t in scores) else "the router has NaN or infinity"

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        tokens = x.reshape(-1, x.shape[-1])
        expert = route_tokens(tokens, self.router.weight, self.router.bias)
        return self.mixture(tokens, expert).view_as(x)

    def plan(self) -> ExpertNeurons:
        """What the kernels know of the index lists; found at the first call, and again when they have changed."""
        key = (self.experts.data_ptr(), self.experts.device)
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, ExpertNeurons(self.experts, len(self.down)))
        return self._plan[1]

    def mixture(self, x: Tensor, expert: Tensor) -> Tensor:
        """Tokens (T, hidden) through the experts (T,), by the way that suits their number."""
        weights = MLPWeights(self.up, self.down, self.up_bias, self.down_bias, self.activation, self.activation_name)
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return masked_by_lists(x, expert, weights, self.experts)
        if self.mode != "pseudo" and triton_available(x, weights):
            return triton_experts(x, expert, weights, self.experts)
        if self.mode == "pseudo" or x.device.type != "cpu":
            return masked_experts(x, expert, weights, self.plan().neuron_mask(x.dtype, x.device))
        compiled, plan = rows_available(x.dtype, weights.name), self.plan()
        # Copies of every expert's neurons together are no dense MLP.
        if compiled and len(x) < (plan.grouped if self.mode == "materialised" else plan.few):
            return rowwise_experts(x, expert, weights, plan)
        if self.mode == "materialised" or len(x) >= plan.grouped:
            return grouped_experts(x, expert, weights, plan)
        return masked_experts(x, expert, weights, plan.neuron_mask(x.dtype, x.device))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._plan = None
        super()._load_from_state_dict(*args, **kwargs)


def init_module_weights(module: nn.Module, std: float) -> None:
    """Set what a checkpoint does not bring, as a fresh model has it: part of ``_init_weights``."""
    if isinstance(module, ValueGate | MixtureMLP | Rows):
        for name, parameter in module.named_parameters(recurse=False):
            init.zeros_(parameter) if "bias" in name else init.normal_(parameter, 0.0, std)
    if isinstance(module, MixtureMLP):
        init.copy_(module.experts, torch.arange(module.experts.shape[1]).expand_as(module.experts))
    if isinstance(module, Attention):
        init.copy_(module.turned_index, torch.arange(module.turned))
        for mask in (module.query_mask, module.value_mask):
            if mask is not None:
                init.copy_(mask, torch.ones_like(mask))
