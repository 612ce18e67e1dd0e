"""Plans on models of every family: live, and undone bit for bit."""

import pytest
import torch
from torch.nn import functional as F

from freemoe.core.errors import FamilyError, RecipeError
from freemoe.hookmoe.hooks.hook import new_hooks
from freemoe.hookmoe.measure import record_routes
from freemoe.hookmoe.plans.apply import apply_plan, probe_router_k, routed_shapes, truncate_slots
from freemoe.hookmoe.plans.dynamic import router_renormalises
from freemoe.hookmoe.plans.layers import expert_counts, moe_layers, plan_of
from freemoe.hookmoe.plans.plan import LayerPlan, uniform_plan
from tests.hookmoe.conftest import blocks_of, logits
from tests.tiny import CASES, tiny_model


def test_a_plan_acts_as_the_probe_says_and_is_undone_bit_for_bit(mixture):
    before, base = logits(mixture), plan_of(mixture)
    probe_router_k(mixture)
    plan = uniform_plan(base, 1)
    with apply_plan(mixture, plan):
        assert set(routed_shapes(mixture).values()) == {1}
        reduced = logits(mixture)
    assert not torch.equal(reduced, before)
    assert torch.equal(logits(mixture), before)
    assert plan_of(mixture) == base


def test_layers_have_their_own_k_and_plans_nest(mixtral):
    with apply_plan(mixtral, LayerPlan((1, 2, 3))):
        assert routed_shapes(mixtral) == {0: 1, 1: 2, 2: 3}
        with apply_plan(mixtral, LayerPlan((2, 1, 1))):
            assert routed_shapes(mixtral) == {0: 2, 1: 1, 2: 1}
        assert plan_of(mixtral) == LayerPlan((1, 2, 3))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2"])
def test_a_block_of_fewer_experts_behind_a_hook_is_the_papers_equations_1_2_3_and_6(family, k):
    model = tiny_model(family)
    number, size = model.config.num_hidden_layers - 1, model.config.hidden_size
    block, hooks = model.model.layers[number].mlp, new_hooks(model, {number: 5}, "block", "pre")
    ((_, hook),) = hooks.items()
    torch.nn.init.normal_(hook.down.weight)
    x = torch.randn(9, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), apply_plan(model, uniform_plan(plan_of(model), k)), hooks.attached(model):
        found = block(x[None])[0]
    for token, written in zip(x, found, strict=True):
        token = token + 0.5 * hook.down.weight @ torch.relu(hook.up.weight @ token)
        share = (token @ block.gate.weight.T).softmax(-1)
        top = share.argsort(descending=True)[:k]
        expected = torch.zeros_like(token)
        for expert in top:
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            expected += share[expert] * (block.experts.down_proj[expert] @ (F.silu(gate) * up))
        if family == "mixtral":  # DeepSeek's router does not renormalise, with fewer experts neither
            expected /= share[top].sum()
        else:  # two shared experts, whose weights stand side by side
            gates, ups, downs = (
                getattr(block.shared_experts, f"{name}_proj").weight for name in ("gate", "up", "down")
            )
            for gate, up, down in zip(gates.chunk(2), ups.chunk(2), downs.chunk(2, 1), strict=True):
                expected += down @ (F.silu(gate @ token) * (up @ token))
        torch.testing.assert_close(written, expected, atol=1e-5, rtol=1e-5)


def test_a_plan_is_undone_after_an_error(mixtral):
    with pytest.raises(ZeroDivisionError), apply_plan(mixtral, LayerPlan((1, 1, 1))):
        raise ZeroDivisionError
    assert plan_of(mixtral) == LayerPlan((2, 2, 2))


def test_dense_layers_are_left_out():
    assert plan_of(tiny_model("deepseek_v2")).ks == (None, 2, 2)
    assert expert_counts(tiny_model("qwen2_moe")) == [4, None, 4]


def test_rescaling_keeps_mass_or_sum():
    weights, index = torch.tensor([[0.2, 0.5, 0.1]]), torch.tensor([[7, 3, 5]])
    kept, slot = truncate_slots(weights, index, 2, renorm=False)
    assert slot.tolist() == [[3, 7]]
    torch.testing.assert_close(kept, torch.tensor([[0.5, 0.2]]))
    kept, _ = truncate_slots(weights, index, 2, renorm=True)
    torch.testing.assert_close(kept.sum(-1), weights.sum(-1))


@pytest.mark.parametrize("rescale", ["kept_mass", "renorm"])
def test_a_gate_with_a_correction_keeps_the_experts_that_it_would_choose_itself(corrected, rescale):
    lowest = moe_layers(corrected)[0].number

    def chosen():
        # Of the lowest mixture: higher ones see other inputs where weights differ.
        return record_routes(corrected, blocks_of(2))[lowest].flatten().tolist()

    plan = uniform_plan(plan_of(corrected), 1)
    with apply_plan(corrected, plan):
        own = chosen()
    with apply_plan(corrected, plan, rescale):
        assert chosen() == own


def test_rescaling_is_the_models_own_rule_where_that_is_the_same(mixture):
    plan = uniform_plan(plan_of(mixture), 1)
    same, other = ("renorm", "kept_mass") if router_renormalises(mixture) else ("kept_mass", "renorm")
    before = logits(mixture)
    with apply_plan(mixture, plan):
        own = logits(mixture)
    with apply_plan(mixture, plan, same):
        assert set(routed_shapes(mixture).values()) == {1}
        torch.testing.assert_close(logits(mixture), own, rtol=1e-4, atol=1e-5)
    with apply_plan(mixture, plan, other):
        assert (logits(mixture) - own).abs().max() > 1e-4
    assert torch.equal(logits(mixture), before)


def test_a_router_whose_k_does_not_act_fails_the_probe(mixtral):
    gate = moe_layers(mixtral)[1].gate
    forward = type(gate).forward

    def deaf(hidden):
        old, gate.top_k = gate.top_k, 2
        try:
            return forward(gate, hidden)
        finally:
            gate.top_k = old

    gate.forward = deaf
    with pytest.raises(FamilyError, match=r"does not act: model\.layers\.1\.mlp ran 2 experts.*set to 1.*\[1\]"):
        probe_router_k(mixtral)


@pytest.mark.parametrize("name", [n for n in CASES if n in ("llama", "gpt2", "gemma3")])
def test_a_dense_model_is_refused(name):
    with pytest.raises(FamilyError, match=r"dense: it has no router.*mixtral"):
        moe_layers(tiny_model(name))


def test_a_plan_for_another_model_is_refused(mixtral):
    with pytest.raises(RecipeError, match="2 entries"), apply_plan(mixtral, LayerPlan((1, 1))):
        pass
    with pytest.raises(RecipeError, match="rescale is 'all'"), apply_plan(mixtral, LayerPlan((1, 1, 1)), "all"):
        pass
