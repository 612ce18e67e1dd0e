"""A training step beside slow versions written from the paper's equations, with every gradient."""

import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import rotate_half

from freemoe.tomoe.gates.discretize import structure_of
from freemoe.tomoe.gates.hypernetwork import RECURRENT
from freemoe.tomoe.gates.losses import balance_loss, mask_union, union_loss
from freemoe.tomoe.gates.train import HISTORY_COLUMNS
from tests.tomoe.gates.test_train import PAPER, recipe, text, trainer

STEP, TAU, B = 3, 0.4, 3.0


def gumbel(shape, generator):
    return -torch.log(-torch.log(torch.rand(shape, generator=generator).clamp(1e-20, 1 - 1e-7)))


def straight(hard, soft):
    return soft + (hard.float() - soft).detach()


def kept(logits, generator):
    """ST-GS of Eq. 3: whether logits + g + b is above zero, with the gradient of its sigmoid over tau."""
    x = logits + gumbel(logits.shape, generator) + B
    return straight(x > 0, 1 / (1 + torch.exp(-x / TAU)))


def embeddings(networks):
    """Eq. 1 with Tab. 8's GRU over sublayers in both directions: (sublayers, experts, 2 x 64)."""

    def one_way(inputs, suffix):
        w = {n.removesuffix(suffix): p for n, p in networks.gru.named_parameters()}
        h, found = inputs[0].new_zeros(len(inputs[0]), RECURRENT), []
        for z in inputs:
            of_input = (z @ w["weight_ih_l0"].T + w["bias_ih_l0"]).chunk(3, -1)
            of_state = (h @ w["weight_hh_l0"].T + w["bias_hh_l0"]).chunk(3, -1)
            reset, update = (torch.sigmoid(of_input[n] + of_state[n]) for n in (0, 1))
            new = torch.tanh(of_input[2] + reset * of_state[2])
            h = (1 - update) * new + update * h
            found.append(h)
        return found

    sublayers = list(networks.z)
    ahead, back = one_way(sublayers, ""), one_way(sublayers[::-1], "_reverse")[::-1]
    return torch.stack([torch.cat(pair, -1) for pair in zip(ahead, back, strict=True)])


def test_sublayers_of_a_step_are_the_papers_equations_with_their_gradients():
    own = trainer(recipe(**PAPER))
    model, networks, gating = own.model.model, own.hypernetwork, own.gating
    # Offsets of logits are ours; under `paper` they stay at zero.
    parameters = [p for n, p in networks.named_parameters() if p.requires_grad and not n.endswith("offset")]
    g = torch.Generator().manual_seed(1)
    x, weights = torch.randn(2, 2, 7, model.config.hidden_size, generator=g)
    angles = model.rotary_emb(x, torch.arange(7)[None])
    mlp, attention = model.layers[0].mlp, model.layers[0].self_attn

    def noise(site):
        return gating.noise_generator(STEP, site, x.device)

    def gradients(*losses):
        return list(torch.autograd.grad(sum(losses), parameters, allow_unused=True))  # type: ignore[arg-type]

    made = gating.sample_masks(networks(), None, STEP)
    with gating.apply_masks(networks, made, STEP):
        outputs = mlp(x), attention(x, position_embeddings=angles, attention_mask=None)[0]
        seen = made[0]
        parts = balance_loss(seen.chosen, seen.probabilities, "gumbel"), union_loss(mask_union(seen.mlp))
        found = [*outputs, *parts, union_loss(seen.value_union), seen.value_counts.amax()]
        ours = gradients(*((out * weights).sum() for out in found))

    # Eq. 1: expert embeddings of the hypernetwork, attention's and the MLP's of the first layer.
    embedded = embeddings(networks)
    gates = networks.mlp[0]

    def decoded(embedding):
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


def test_a_step_descends_equation_10_by_adamw():
    own, wanted = (trainer(recipe(**PAPER, active=0.6)) for _ in range(2))
    model, losses, batch = wanted.model, wanted.recipe.losses, wanted.step_batch(0)
    own.train_until(1)

    made = wanted.gating.sample_masks(wanted.hypernetwork(), None, 0)
    dense = model(batch.ids, position_ids=batch.positions).logits.log_softmax(-1)
    with wanted.gating.apply_masks(wanted.hypernetwork, made, 0):
        pruned = model(batch.ids, position_ids=batch.positions).logits.log_softmax(-1)
        kl = (dense.exp() * (dense - pruned)).sum(-1).mean()
        # Eq. 8: T(d) of the widest expert, of the token with most value dimensions, and of the pairs kept of query and key.
        active, total, unions, balances = 0.0, 0, [], []
        for layer, seen in zip(model.model.layers, made, strict=True):
            qk, mlp = seen.qk, seen.mlp
            attention, size = layer.self_attn, layer.self_attn.head_dim
            for linear, width in (
                (attention.q_proj, 2 * qk.sum()),
                (attention.k_proj, 2 * qk.sum()),
                (attention.v_proj, seen.value_counts.max()),
                (attention.o_proj, seen.value_counts.max()),
            ):
                active, total = active + linear.weight.numel() * width / size, total + linear.weight.numel()
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                numbers = linear.weight.numel()
                active, total = active + numbers * mlp.sum(1).max() / mlp.shape[1], total + numbers
            union = 1 - torch.stack([1 - row for row in mlp]).prod(0)
            unions.append(-union.mean().log() - seen.value_union.mean().log())
            balances.append(balance_loss(seen.chosen, seen.probabilities, "gumbel"))
        ratio = active / (0.6 * total)
        size_term = torch.log(torch.maximum(ratio, 1 / ratio))
        terms = kl, size_term, sum(unions) / len(unions), sum(balances) / len(balances)
        loss = terms[0] + losses.size * terms[1] + losses.union * terms[2] + losses.balance * terms[3]
        loss.backward()
    history = dict(zip(HISTORY_COLUMNS, own.history[0], strict=True))
    names = ("loss", "distillation", "size", "union", "balance", "active")
    for name, value in zip(names, (loss, *terms, active / total), strict=True):
        torch.testing.assert_close(history[name], value.item(), atol=1e-5, rtol=1e-5)

    # App. C: AdamW, rate 1e-3, weight decay 0.05. Its first step goes by g / |g|, which says nothing of a gradient of noise.
    pairs = zip(own.hypernetwork.named_parameters(), wanted.hypernetwork.parameters(), strict=True)
    for (name, after), before in pairs:
        if before.grad is None or name.endswith("offset"):
            continue
        torch.testing.assert_close(after.grad, before.grad, atol=1e-5, rtol=1e-5)
        step = before.grad / (before.grad.abs() + 1e-8)
        clear = before.grad.abs() > 1e-5
        expected = before * (1 - 1e-3 * 0.05) - 1e-3 * step
        torch.testing.assert_close(after[clear], expected[clear], atol=1e-5, rtol=1e-5)


def test_experts_of_an_export_with_noise_are_equations_11_and_15():
    own = trainer(recipe(**PAPER, gates={"export": "threshold", "export_noise": True}))
    networks, embedded = own.hypernetwork, embeddings(own.hypernetwork)
    for number, layer in enumerate(structure_of(own, text(seed=1))):
        gates = networks.mlp[number]
        decoded = F.gelu(gates.norm(embedded[2 * number + 1])) @ gates.decode.weight.T
        noise = gumbel(decoded.shape, own.gating.noise_generator(0, 5 * number + 1, decoded.device))
        sampled = torch.sigmoid((decoded + noise + B) / TAU).round().bool()
        # App. E: every expert has the size of the largest; the sampled neurons stay.
        assert bool((layer.experts | ~sampled).all())
        assert set(layer.experts.sum(1).tolist()) == {int(sampled.sum(1).max())}
