"""Hooks: step 0 is the reduced model bit for bit, detaching leaves nothing behind, scope and position are what they say."""

import pytest
import torch

from freemoe.core.errors import RecipeError
from freemoe.hookmoe.hooks.hook import Hook, HookSet, allocate_units, new_hooks
from freemoe.hookmoe.measure import record_routes
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.layers import moe_layers, plan_of
from freemoe.hookmoe.plans.plan import uniform_plan
from tests.hookmoe.conftest import blocks_of, logits
from tests.tiny import tiny_model

WAYS = [("block", "pre"), ("routed", "pre"), ("block", "parallel")]


def stirred(hooks, seed=0):
    """The hooks with weights that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, hook in hooks.items():
            hook.down.weight.normal_(std=0.3, generator=generator)
    return hooks


def widths(model, d=5):
    return {layer.number: d for layer in moe_layers(model)}


def test_the_hook_is_equation_6():
    hook = Hook(4, 3, generator=torch.Generator().manual_seed(1))
    torch.nn.init.normal_(hook.down.weight)
    x = torch.randn(2, 5, 4)
    by_hand = x + 0.5 * torch.relu(x @ hook.up.weight.T) @ hook.down.weight.T
    torch.testing.assert_close(hook(x), by_hand)
    assert sum(p.numel() for p in hook.parameters()) == 2 * 4 * 3 + 1


@pytest.mark.parametrize(("scope", "position"), WAYS)
def test_step_0_is_the_reduced_model_and_detaching_is_bit_equal(mixture, scope, position):
    before, names = logits(mixture), list(mixture.state_dict())
    hooks = new_hooks(mixture, widths(mixture), scope, position)
    with apply_plan(mixture, uniform_plan(plan_of(mixture), 1)):
        reduced = logits(mixture)
        with hooks.attached(mixture):
            assert torch.equal(logits(mixture), reduced)
            assert list(mixture.state_dict()) == names
        stirred(hooks)
        with hooks.attached(mixture):
            assert not torch.equal(logits(mixture), reduced)
        assert torch.equal(logits(mixture), reduced)
    assert torch.equal(logits(mixture), before)


@pytest.mark.parametrize(("scope", "position"), WAYS)
def test_gradients_reach_every_tensor_of_every_hook(mixture, scope, position):
    hooks = stirred(new_hooks(mixture, widths(mixture), scope, position, bias=True))
    with hooks.attached(mixture):
        mixture(input_ids=torch.arange(3, 19)[None], use_cache=False).logits.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in hooks.parameters())


def test_scopes_differ_only_where_there_are_shared_experts(mixture):
    found = []
    for scope in ("block", "routed"):
        hooks = stirred(new_hooks(mixture, widths(mixture), scope, "pre"))
        with hooks.attached(mixture):
            found.append(logits(mixture))
    shared = any("shared" in name for name, _ in mixture.named_modules())
    assert torch.equal(*found) is not shared


def test_a_parallel_hook_leaves_its_own_layers_routes_as_they_are(mixtral):
    blocks = blocks_of()
    before = record_routes(mixtral, blocks)
    same = {}
    for position in ("pre", "parallel"):
        hook = stirred(new_hooks(mixtral, {1: 6}, "block", position))
        with hook.attached(mixtral):
            now = record_routes(mixtral, blocks)
        same[position] = torch.equal(now[1], before[1])
        assert torch.equal(now[0], before[0])
    assert same == {"pre": False, "parallel": True}


def test_hooks_are_drawn_from_the_seed_alone(mixtral):
    one, two, other = (new_hooks(mixtral, {0: 4, 2: 3}, "block", "pre", seed=s) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.items()[0][1].up.weight, other.items()[0][1].up.weight)


def test_a_budget_is_divided_by_what_was_lost():
    assert allocate_units(10, {0: 3.0, 2: 1.0, 5: 1.0}) == {0: 6, 2: 2, 5: 2}
    assert sum(allocate_units(7, {0: 1.0, 1: 1.0, 2: 1.0}).values()) == 7
    assert allocate_units(4, {0: -1.0, 1: 2.0}) == {0: 0, 1: 4}
    assert allocate_units(4, {0: 0.0, 1: 0.0}) == {0: 2, 1: 2}


def test_hooks_that_do_not_fit_are_refused(mixtral):
    for model, number, size, says in (
        (mixtral, 7, 32, r"hook stands at layer 7.*\[0, 1, 2\]"),
        (mixtral, 0, 16, "hidden size of 16, the model has 32"),
        (tiny_model("deepseek_v2"), 0, 32, "dense or absent"),
    ):
        with pytest.raises(RecipeError, match=says), HookSet({number: Hook(size, 2)}).attached(model):
            pass
    with pytest.raises(RecipeError, match="scope is 'router'"):
        HookSet({}, scope="router")
    with pytest.raises(RecipeError, match="position is 'after'"):
        HookSet({}, position="after")


def test_hooks_stand_where_their_layers_are(mixtral):
    # The model's own device is that of its first weight, wherever the layers went.
    mixtral.model.embed_tokens.to("meta")
    assert mixtral.device.type == "meta"
    hooks = new_hooks(mixtral, {0: 4, 2: 4}, "block", "parallel")
    assert {p.device.type for p in hooks.parameters()} == {"cpu"}
