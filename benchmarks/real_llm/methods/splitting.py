"""A mixture made from a dense model, so that there is one of its size to trim: the MLP's neurons divided among experts.

No weight of the dense model is changed, none is copied. Half of an MLP's neurons, those that weigh most over all tokens, are
shared by all tokens; without them nothing is left of a model (all divided among eight experts, six of them run: perplexity 46
-> 1,656, 542 with trained routers, on SmolLM2-135M). Of the others every neuron belongs to one expert. Tokens are clustered
at each MLP's input, a cluster is an expert's, and a neuron goes to the expert whose tokens use it most beyond the others.
Routers begin at the clusters' centres and are trained by distillation from the dense model (in the manner of MoEfication,
arXiv:2110.01786, and CMoE, arXiv:2502.04416). What comes out is a plain Qwen2-MoE checkpoint. It is no mixture that was
pretrained as one: its experts were never trained apart from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freemoe.evals.engine.output_head import distillation_loss, forward_blocks_to_head
from freemoe.models.sublayers import DecoderSublayers, find_sublayers
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.gates.initialise import cluster_tokens
from freemoe.tomoe.structures.rivals import measure_activity
from freemoe.training.descent import optimizer_step

_SHARED = 0.5
# Standard deviation of a router's scores over experts before it is trained: who comes first is clear, weights are nearly even.
_SPREAD = 0.3
_CLUSTERED_ROWS = 32


@dataclass(frozen=True, eq=False)
class Split:
    """How one layer is divided."""

    shared: Tensor  # (neurons of all tokens,) int64
    neurons: Tensor  # (experts, neurons of an expert) int64; with the shared ones every neuron once
    router: Tensor  # (experts, hidden), scores of a token's input


def divide(model: Any, blocks: PackedBlocks, experts: int, seed: int) -> list[Split]:
    """Divide every layer's neurons among all tokens and experts; their number divides the half that is not shared."""
    sublayers = find_sublayers(model)
    part = blocks.select_rows(range(min(len(blocks), _CLUSTERED_ROWS)))
    centres = cluster_tokens(model, sublayers, part, experts, seed)
    found = []
    for layer, own, (centre, _) in zip(
        sublayers, measure_activity(model, sublayers, part, centres), centres, strict=True
    ):
        weight = own.neurons.sum(0) * layer.down.weight.detach().float().norm(dim=0)
        order = weight.argsort(descending=True, stable=True).cpu()
        shared, rest = (part.sort().values for part in order.tensor_split([round(_SHARED * layer.intermediate_size)]))
        used = (own.neurons / own.tokens.clamp(min=1)[:, None]).cpu()[:, rest]
        beyond = used / used.mean(0).clamp(min=1e-12)
        neurons = rest[evenly(beyond, len(rest) // experts)]
        found.append(Split(shared, neurons, _router(centre, own.tokens)))
    return found


def evenly(scores: Tensor, size: int) -> Tensor:
    """Give every expert so many neurons, the clearest cases first: (experts, size) int64, rising within an expert.

    ``scores``: (experts, neurons), how much an expert wants a neuron.

    Raises:
        ValueError: The neurons cannot be divided evenly.
    """
    experts, neurons = scores.shape
    if experts * size != neurons:
        raise ValueError(f"{neurons} neurons cannot be divided evenly among {experts} experts")
    owner, left = [-1] * neurons, [size] * experts
    for place in scores.flatten().argsort(descending=True, stable=True).tolist():
        expert, neuron = divmod(place, neurons)
        if owner[neuron] < 0 and left[expert]:
            owner[neuron] = expert
            left[expert] -= 1
    return torch.tensor(owner).argsort(stable=True).view(experts, size)


def _router(centres: Tensor, tokens: Tensor) -> Tensor:
    """Scores that say how near a token is to every centre, measured from their mean: these routers have no bias."""
    apart = centres - (centres * tokens.cpu()[:, None]).sum(0) / tokens.sum().cpu()
    spread = (centres @ apart.T).std(1, correction=0).mean()
    return apart * (_SPREAD / spread.clamp(min=1e-12))


def mixture(model: Any, splits: Sequence[Split], k: int) -> Any:
    """The dense model as a Qwen2-MoE whose tokens use k experts.

    Its weights of all experts sum to one, whatever k, so what experts write is made as many times as large as there are
    experts: under even weights parts are added up as in the dense MLP, and with k = all experts it is the dense model. The
    shared part stands behind a gate that begins at one half, and is made twice as large.
    The model is a Llama, whose weights are copied; there is a split for each of its layers.
    """
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    experts, size = splits[0].neurons.shape
    dense = model.config
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    config = Qwen2MoeConfig(
        **{name: getattr(dense, name) for name in same if hasattr(dense, name)},
        intermediate_size=dense.intermediate_size,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=len(splits[0].shared),
        num_experts=experts,
        num_experts_per_tok=k,
        norm_topk_prob=False,
        qkv_bias=False,
        use_sliding_window=False,
    )
    with torch.device("meta"):
        found = Qwen2MoeForCausalLM(config)
    found = found.to_empty(device="cpu")
    state = {n: t.detach().float() for n, t in model.state_dict().items() if ".mlp." not in n}
    for layer, split in zip(find_sublayers(model), splits, strict=True):
        state |= {f"{layer.path}.mlp.{name}": t for name, t in _experts(layer, split).items()}
    found.load_state_dict(state)
    # What is no part of the state (rotary frequencies) was made without numbers.
    found.model.rotary_emb = type(found.model.rotary_emb)(config)
    found.tie_weights()
    return found.eval()


def _experts(layer: DecoderSublayers, split: Split) -> dict[str, Tensor]:
    gate, up = (linear.weight.detach().float() for linear in layer.up)
    down = layer.down.weight.detach().float()
    return {
        "gate.weight": split.router,
        "experts.gate_up_proj": torch.cat([gate[split.neurons], up[split.neurons]], dim=1),
        "experts.down_proj": (len(split.neurons) * down.T[split.neurons]).transpose(1, 2).contiguous(),
        "shared_expert.gate_proj.weight": gate[split.shared],
        "shared_expert.up_proj.weight": up[split.shared],
        "shared_expert.down_proj.weight": 2 * down[:, split.shared],
        "shared_expert_gate.weight": gate.new_zeros(1, gate.shape[1]),
    }


def train_routers(
    sparse: Any, dense: Any, blocks: PackedBlocks, steps: int, rows: int, rate: float, on_step: Callable[[float], None]
) -> list[Tensor]:
    """Train nothing but the routers of a mixture, in place, to say what the dense model says; returns them, (experts, hidden) each.

    Adam, ``rows`` blocks a step in order; the rate falls as a cosine from ``rate``, for scores of the unit that `divide` gives.
    ``on_step`` is told every step's divergence in nats per token.
    """
    for parameter in sparse.parameters():
        parameter.requires_grad_(False)
    routers = [layer.mlp.gate.weight.requires_grad_() for layer in sparse.model.layers]
    # Each router in its own unit: Adam's step is a share of what the router began with.
    units = [float(r.detach().abs().mean()) for r in routers]
    optimizer = torch.optim.Adam([{"params": [r], "lr": rate * u} for r, u in zip(routers, units, strict=True)])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        batch = blocks.select_rows([(step * rows + i) % len(blocks) for i in range(rows)])
        everywhere = torch.arange(batch.ids.numel())
        with torch.no_grad():
            teacher = forward_blocks_to_head(dense, batch, everywhere)
        with torch.enable_grad():
            loss = distillation_loss(forward_blocks_to_head(sparse, batch, everywhere), teacher)
            optimizer_step(optimizer, [loss], step)
        schedule.step()
        on_step(loss.item())
    return [r.requires_grad_(False) for r in routers]
