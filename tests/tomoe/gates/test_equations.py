"""A training step's sublayers beside slow versions written from the paper's equations, with every gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import rotate_half

from freemoe.tomoe.gates.losses import balance_loss, mask_union, union_loss
from tests.tomoe.gates.test_train import PAPER, recipe, trainer

STEP, TAU, B = 3, 0.4, 3.0


def gumbel(shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    return -torch.log(-torch.log(torch.rand(shape, generator=generator).clamp(1e-20, 1 - 1e-7)))


def straight(hard: Tensor, soft: Tensor) -> Tensor:
    return soft + (hard.float() - soft).detach()


def kept(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """ST-GS of Eq. 3: whether logits + g + b is above zero, with the gradient of its sigmoid over tau."""
    x = logits + gumbel(logits.shape, generator) + B
    return straight(x > 0, 1 / (1 + torch.exp(-x / TAU)))


def test_sublayers_of_a_step_are_the_papers_equations_with_their_gradients() -> None:
    own = trainer(recipe(**PAPER))
    model, networks, gating = own.model.model, own.hypernetwork, own.gating
    # Offsets of logits are ours; under `paper` they stay at zero.
    parameters = [p for n, p in networks.named_parameters() if p.requires_grad and not n.endswith("offset")]
    g = torch.Generator().manual_seed(1)
    x, weights = torch.randn(2, 2, 7, model.config.hidden_size, generator=g)
    angles = model.rotary_emb(x, torch.arange(7)[None])
    mlp, attention = model.layers[0].mlp, model.layers[0].self_attn

    def noise(site: int) -> torch.Generator | None:
        return gating.noise_generator(STEP, site, x.device)

    def gradients(*losses: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad(sum(losses), parameters, allow_unused=True))  # type: ignore[arg-type]

    logits = networks()
    made = gating.sample_masks(logits, None, STEP)
    with gating.apply_masks(networks, logits, made, None, STEP):
        outputs = mlp(x), attention(x, position_embeddings=angles, attention_mask=None)[0]
        seen = made.seen[0]
        assert seen.chosen is not None
        assert seen.probabilities is not None
        assert seen.value_union is not None
        parts = balance_loss(seen.chosen, seen.probabilities, "gumbel"), union_loss(mask_union(made.mlp[0]))
        found = [*outputs, *parts, union_loss(seen.value_union), seen.value_counts.amax()]
        ours = gradients(*((out * weights).sum() for out in found))

    # Eq. 1: expert embeddings of the hypernetwork, attention's and the MLP's of the first layer.
    embedded, _ = networks.gru(networks.z)
    gates = networks.mlp[0]

    def decoded(embedding: Tensor) -> Tensor:
        return F.gelu(gates.norm(embedding)) @ gates.decode.weight.T

    # Eq. 5 and 6: the token's expert, and the mask that is decoded of its embedding; Eq. 2: on gate and on up.
    routed = x @ gates.router.weight.T + gates.router.bias
    soft = torch.exp((routed + gumbel(routed.shape, noise(3))) / TAU)
    soft = soft / soft.sum(-1, keepdim=True)
    choice = straight(soft == soft.amax(-1, keepdim=True), soft)
    s = kept(decoded(choice @ embedded[1]), noise(4))
    gate, up = F.silu(x @ mlp.gate_proj.weight.T), x @ mlp.up_proj.weight.T
    slow = [((gate * s) * (up * s)) @ mlp.down_proj.weight.T]

    # Eq. 3 and 4: static masks of pairs of query and key dimensions, a mask per token on values and outputs.
    own_gates, mean = networks.attention[0], embedded[0].mean(0)
    size = own_gates.head_dim
    pairs = kept(F.gelu(own_gates.norm(mean)) @ own_gates.decode.weight[size:].T, noise(0)).repeat(2)
    local = F.gelu(own_gates.norm(x @ own_gates.project.weight.T + mean))
    values = kept(local @ own_gates.decode.weight[:size].T, noise(2))
    heads = [(x @ w.weight.T).unflatten(-1, (-1, size)) for w in (attention.q_proj, attention.k_proj, attention.v_proj)]
    cos, sin = (angle[:, :, None] for angle in angles)
    q, k = ((h * cos + rotate_half(h) * sin) * pairs for h in heads[:2])
    k, v = (h.repeat_interleave(q.shape[2] // h.shape[2], 2) for h in (k, heads[2] * values[:, :, None]))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", scores, v) * values[:, :, None]
    slow.append(mixed.flatten(2) @ attention.o_proj.weight.T)

    # Eq. 9, then Eq. 16 and 7: of the experts' masks, and of the values that some token keeps.
    share = choice.detach().mean((0, 1))
    slow.append(len(share) * (share * soft.mean((0, 1))).sum())
    for masks in (kept(decoded(embedded[1]), noise(1)), values.flatten(0, 1)):
        union = 1 - torch.stack([1 - row for row in masks]).prod(0)
        slow.append(torch.log(1 / union.mean()))
    slow.append(values.sum(-1).amax())
    for fast, plain in zip(found, slow, strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
    for fast, plain in zip(ours, gradients(*((out * weights).sum() for out in slow)), strict=True):
        assert (fast is None) == (plain is None)
        if fast is not None:
            torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)
