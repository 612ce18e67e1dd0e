"""Training: the base stays as it is, a resumed run is an unbroken one, budgets hold, and something is learned."""

import math

import pytest
import torch

from freemoe.core.errors import NumericError
from freemoe.models.sublayers import find_sublayers
from freemoe.recipes import recipe_from
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.gates.discretize import equalise_widths, structure_of
from freemoe.tomoe.gates.gating import _ExpertMask
from freemoe.tomoe.gates.initialise import cluster_tokens, measure_layer_importance
from freemoe.tomoe.gates.train import HISTORY_COLUMNS, GateTrainer
from freemoe.tomoe.material import checkpoint_activations
from freemoe.tomoe.recipe import ConvertRecipe
from freemoe.tomoe.structures.structure import active_parameters, dense_parameters, require_structure_fits
from tests.tiny import tiny_model

PAPER = {"profile": "paper", "train": {"steps": 6, "batch_tokens": 48, "block": 24}}


def text(rows=12, length=24, seed=0):
    """Sequences that count on: each token is the one before plus a step of its row."""
    g = torch.Generator().manual_seed(seed)
    start, step = torch.randint(3, 200, (rows, 1), generator=g), torch.randint(1, 4, (rows, 1), generator=g)
    ids = 3 + (start + step * torch.arange(length)) % 280
    return PackedBlocks(ids, torch.arange(length).expand(rows, length))


def recipe(**values):
    data = {"command": "convert", "model": "x", "text": ["x"], "experts": 3}
    data["train"] = {"steps": 6, "batch_tokens": 48, "block": 24, **values.pop("train", {})}
    found = recipe_from({**data, **values})
    assert isinstance(found, ConvertRecipe)
    return found


def trainer(own, family="llama", device="cpu"):
    model = tiny_model(family).to(device)
    for p in model.parameters():
        p.requires_grad_(False)
    sublayers = find_sublayers(model)
    found = GateTrainer(model, sublayers, own, text())
    if own.gates.start == "statistics":
        routers = cluster_tokens(model, sublayers, text(), own.experts, own.seed)
        found.start_from_statistics(measure_layer_importance(model, sublayers, text(), routers))
    return found


def finished(own):
    """The structure, and its share of the weights."""
    structure = structure_of(own, text(seed=1))
    require_structure_fits(structure, own.sublayers)
    return structure, active_parameters(structure, own.sublayers) / dense_parameters(own.sublayers)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi", "gemma"])
def test_the_base_is_not_touched_and_gates_move(family):
    own = trainer(recipe(train={"steps": 3}), family)
    before = {n: p.clone() for n, p in own.model.named_parameters()}
    logits = [layer.mlp.clone() for layer in own.hypernetwork()]
    own.train_until(3)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in own.model.named_parameters())
    assert not any(torch.equal(a, b.mlp) for a, b in zip(logits, own.hypernetwork(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in own.model.modules())


@pytest.mark.parametrize("active", [0.3, 0.5, 0.8])
def test_an_exact_budget_holds_at_every_step_and_at_the_end(active):
    own = trainer(recipe(active=active))
    own.train_until(6)
    column = HISTORY_COLUMNS.index("active")
    assert all(active - 0.03 <= row[column] <= active + 1e-6 for row in own.history)
    assert finished(own)[1] == pytest.approx(own.history[-1][column], abs=1e-6)


@pytest.mark.parametrize("active", [0.3, 0.5, 0.7])
def test_thresholds_are_exported_at_the_share_that_was_asked_for(active):
    """Noise keeps more in training than a threshold does: unmoved, the share is that of the threshold."""
    shares = {}
    for export in ("share", "threshold"):
        own = trainer(recipe(active=active, **PAPER, gates={"export": export}))
        own.train_until(2)
        shares[export] = finished(own)[1]
    assert shares["share"] == pytest.approx(active, abs=0.01)
    assert abs(shares["threshold"] - active) > 0.05


def test_whole_heads_are_exported_near_the_share_that_was_asked_for():
    """A head is a large part of so small a model; its dimensions stay whole."""
    own = trainer(recipe(active=0.5, **PAPER, gates={"attention": "heads"}))
    own.train_until(2)
    structure, share = finished(own)
    assert share == pytest.approx(0.5, abs=0.1)
    assert {layer.value_width for layer in structure} == {own.sublayers[0].rotary.head_dim}


def test_one_choice_of_value_dimensions_has_one_draw():
    counts = {}
    for masks in ("static", "tokens"):
        own = trainer(recipe(**PAPER, gates={"value_masks": masks, "offset": 0.0}))
        made = own.gating.sample_masks(own.hypernetwork(), None, 1)
        with own.gating.apply_masks(own.hypernetwork, made, 1):
            own.model(text().ids)
        counts[masks] = [len(set(layer.value_counts.tolist())) for layer in made]
    assert set(counts["static"]) == {1}
    assert min(counts["tokens"]) > 1


def test_long_trainings_move_routers_slowly_and_offsets_at_their_rate():
    def rates(**train):
        return [group["lr"] for group in trainer(recipe(train=train)).optimizer.param_groups]

    assert rates(steps=60) == pytest.approx([3e-4, 3e-2])
    assert rates(steps=1920) == pytest.approx([3e-4 / 32, 3e-2])
    assert rates(steps=1920, rate_steps=0) == [3e-4, 3e-2]
    paper = trainer(recipe(profile="paper", train={"steps": 10000}))
    assert [group["lr"] for group in paper.optimizer.param_groups] == [1e-3]


def test_the_ramp_leads_to_the_budget():
    own = trainer(recipe(train={"ramp": 0.5, "steps": 10}))
    shares = [own.target_share(step) for step in range(10)]
    assert shares[0] == pytest.approx(0.9)
    assert shares == sorted(shares, reverse=True)
    assert shares[4:] == [0.5] * 6


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"gates": {"noise": True}},
        {"gates": {"value_masks": "static", "query_masks": False}},
        {"profile": "paper"},
        {"profile": "authors"},
        {"train": {"checkpointing": True}, "gates": {"noise": True}},
    ],
    ids=["default", "noise", "static", "paper", "authors", "checkpointing"],
)
def test_a_resumed_run_is_an_unbroken_one(values):
    unbroken, first, second = (trainer(recipe(**values)) for _ in range(3))
    unbroken.train_until(6)
    first.train_until(3)
    second.load_state({name: t.clone() for name, t in first.to_state().items()})
    second.train_until(6)
    a, b = unbroken.to_state(), second.to_state()
    assert sorted(a) == sorted(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_seeds_and_noise_make_a_difference_and_nothing_else_does():
    runs = []
    for seed in (0, 0, 1):
        own = trainer(recipe(seed=seed, gates={"noise": True}))
        torch.manual_seed(len(runs))
        own.train_until(3)
        runs.append(own.to_state()["history"])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_checkpointing_changes_no_gradient():
    plain, saving = trainer(recipe(gates={"noise": True})), trainer(recipe(gates={"noise": True}))
    checkpoint_activations(saving.model)
    plain.train_until(2)
    saving.train_until(2)
    for (name, a), b in zip(plain.to_state().items(), saving.to_state().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name, rtol=1e-4, atol=1e-5)


def test_training_brings_the_model_nearer_to_the_dense_one():
    own = trainer(recipe(active=0.6, train={"steps": 60, "batch_tokens": 288, "offset_rate": 0.01}))
    own.train_until(60)
    losses = [row[HISTORY_COLUMNS.index("distillation")] for row in own.history]
    assert sum(losses[-10:]) / 10 < 0.92 * sum(losses[:5]) / 5


def test_a_loss_that_is_no_number_stops_and_keeps_the_state():
    own = trainer(recipe())
    own.train_until(2)
    before = own.to_state()
    weight = own.model.get_output_embeddings().weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(NumericError, match=r"loss of step 2 is nan.*train.rate"):
        own.train_until(4)
    with torch.no_grad():
        weight.copy_(good)
    after = own.to_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_expert_embeddings_the_attention_knows_the_token_alone():
    """Table 13, Local Emb: what the hypernetwork says reaches the MLPs only, and each token still decides for itself."""
    own = trainer(recipe(profile="paper", gates={"expert_embedding": False}))
    first = [(layer.qk, layer.mlp) for layer in own.hypernetwork()]
    own.train_until(2)
    gru = [p for n, p in own.hypernetwork.named_parameters() if n.startswith("gru")]
    with torch.no_grad():
        for p in gru:
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    qk = [layer.qk for layer in own.hypernetwork()]
    with torch.no_grad():
        for p in gru:
            p.mul_(3)
    for (begun, mlp), before, after in zip(first, qk, own.hypernetwork(), strict=True):
        assert torch.equal(before, after.qk)
        assert not torch.equal(begun, after.qk), "bits are learned all the same"
        assert not torch.equal(mlp, after.mlp)
        assert not after.value_embedding.any()
    gate = finished(own)[0][0].vo
    assert not gate.embedding.any()
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    assert len(gate.token_mask(x).unique(dim=0)) > 1 or int(gate.keep) == 8


def test_the_union_takes_the_attention_where_it_is_asked_and_size_the_widest_token():
    """R_U and R_P of the paper, from the masks of one step."""
    for asked in (True, False):
        own = trainer(recipe(profile="paper", losses={"union_attention": asked}))
        masks = []

        def look(module, args, output, masks=masks):
            # A dropped dimension of a value is zero in all heads.
            masks.append((output.unflatten(-1, (-1, 8)).abs().sum(-2) > 0).flatten(0, -2).float())

        with torch.no_grad():
            for gates in own.hypernetwork.attention:
                gates.decode.weight.mul_(40)
            made = own.gating.sample_masks(own.hypernetwork(), None, 0)
            with own.gating.apply_masks(own.hypernetwork, made, 0):
                hooks = [layer.v.register_forward_hook(look) for layer in own.sublayers]
                own._run_to_head(own.step_batch(0))
                for hook in hooks:
                    hook.remove()
            parts = own._regularisation_terms(made, 0.5)
        active, covered = 0.0, 0.0
        for layer, drawn, mask in zip(own.sublayers, made, masks, strict=True):
            assert 0 < float(mask.mean()) < 1
            attention = layer.hidden_size * (layer.heads + layer.kv_heads)
            active += attention * float(layer.rotary.expand_bits(drawn.qk).sum() + mask.sum(-1).max())
            active += 3 * layer.hidden_size * float(drawn.mlp.sum(-1).max())
            covered -= math.log(float(drawn.mlp.any(0).float().mean()))
            covered -= math.log(float(mask.any(0).float().mean())) * asked
        assert float(parts["active"]) == pytest.approx(active / dense_parameters(own.sublayers))
        assert float(parts["union"]) == pytest.approx(covered / len(own.sublayers), abs=1e-6)


def test_the_texts_own_next_tokens_can_be_learned_instead_of_the_teachers():
    own = trainer(recipe(train={"loss": "lm"}))
    batch, made = own.step_batch(0), own.gating.sample_masks(own.hypernetwork(), own.exact_widths(0.5), 0)
    with torch.no_grad(), own.gating.apply_masks(own.hypernetwork, made, 0):
        found = own.model(batch.ids, position_ids=batch.positions).logits
        wanted = torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten())
    calls = []
    hook = own.model.base_model.register_forward_pre_hook(lambda module, args: calls.append(1))
    own.train_until(1)
    hook.remove()
    assert own.history[0][HISTORY_COLUMNS.index("distillation")] == pytest.approx(float(wanted), rel=1e-5)
    assert len(calls) == 1, "no teacher is asked"


def test_paper_profile_ends_with_equal_widths_and_a_counted_k():
    own = trainer(recipe(**PAPER))
    own.train_until(6)
    for layer in finished(own)[0]:
        assert len(set(layer.neuron_counts)) == 1
        assert 1 <= layer.value_width <= 8


def test_the_expert_mask_is_one_product_and_its_gradient_sees_the_dropped():
    g = torch.Generator().manual_seed(0)
    a = torch.randn(9, 6, generator=g, requires_grad=True)
    table = (torch.rand(3, 6, generator=g) > 0.5).float().requires_grad_()
    chosen = torch.eye(3)[torch.randint(0, 3, (9,), generator=g)].requires_grad_()
    weights = torch.randn(9, 6, generator=g)
    found = _ExpertMask.apply(a, chosen, table)
    own = torch.autograd.grad((found * weights).sum(), (a, chosen, table))
    expected = a * (chosen @ table)
    wanted = torch.autograd.grad((expected * weights).sum(), (a, chosen, table))
    assert torch.equal(found, expected)
    for x, y in zip(own, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_equalised_experts_have_one_width_and_what_they_had():
    g = torch.Generator().manual_seed(0)
    experts = torch.rand(4, 30, generator=g) > torch.tensor([[0.9], [0.5], [0.7], [0.8]])
    logits = torch.randn(4, 30, generator=g)
    raised = equalise_widths(experts, logits)
    assert set(raised.sum(1).tolist()) == {int(experts.sum(1).max())}
    assert bool((raised | ~experts).all())
    assert int(raised.any(0).sum()) >= int(experts.any(0).sum())
    for had, values, widened in zip(experts, logits, equalise_widths(experts, logits, "own"), strict=True):
        others = sorted((n for n in range(30) if not had[n]), key=lambda n: -float(values[n]))
        best = others[: int(experts.sum(1).max()) - int(had.sum())]
        assert {n for n in range(30) if widened[n]} == {n for n in range(30) if had[n]} | set(best)
