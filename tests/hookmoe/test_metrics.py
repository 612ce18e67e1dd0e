"""Counts against the published models on the meta device, and against themselves where the answer is known."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from freemoe.hookmoe.hooks.hook import new_hooks
from freemoe.hookmoe.measure import (
    act_equivalent,
    act_per_layer,
    count_parameters,
    load_cv,
    record_routes,
    route_agreement,
)
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.plan import LayerPlan, uniform_plan
from tests.hookmoe.conftest import blocks_of


def sizes(layers, hidden, width, vocabulary, heads, kept, **more):
    """A configuration."""
    own = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": width, "vocab_size": vocabulary}
    return {**own, "num_attention_heads": heads, "num_key_value_heads": heads, "num_experts_per_tok": kept, **more}


_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None}
_GROUPS = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "n_routed_experts": 64, "n_shared_experts": 2}

# Name -> (model type, configuration, reduced k, billions: total, active, active reduced; hook: width, weights in millions)
PUBLISHED = {
    "Mixtral-8x7B": (
        "mixtral",
        sizes(32, 4096, 14336, 32000, 32, 2, num_key_value_heads=8, num_local_experts=8),
        *(1, (46.703, 12.880, 7.243), 14336, 117.44),
    ),
    "Mixtral-8x22B": (
        "mixtral",
        sizes(56, 6144, 16384, 32000, 48, 2, num_key_value_heads=8, num_local_experts=8),
        *(1, (140.621, 39.152, 22.241), 16384, 201.33),
    ),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        sizes(
            *(24, 2048, 5632, 151936, 16, 4),
            **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60},
        ),
        *(1, (14.316, 2.689, 2.066), 2816, 11.53),
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        sizes(27, 2048, 10944, 102400, 16, 6, moe_intermediate_size=1408, first_k_dense_replace=1, **_MLA, **_GROUPS),
        *(3, (15.706, 2.661, 1.986), 2816, 11.53),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_published_models(name):
    model_type, values, k, billions, width, hook = PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    base = plan_of(model)
    full, cut = count_parameters(model, base), count_parameters(model, uniform_plan(base, k))
    found = (full.total, full.active, cut.active)
    assert [round(n / 1e9, 3) for n in found] == list(billions)
    with torch.device("meta"):
        hooks = new_hooks(model, {len(base.ks) - 1: width}, "block", "pre")
    assert round((hooks.num_parameters - 1) / 1e6, 2) == hook
    with_hooks = count_parameters(model, uniform_plan(base, k), hooks)
    assert (with_hooks.total - full.total, with_hooks.active - cut.active) == (
        hooks.num_parameters,
        hooks.num_parameters,
    )


def test_mixtrals_hook_is_two_thirds_of_an_expert_in_one_layer():
    model_type, values, *_ = PUBLISHED["Mixtral-8x7B"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
        hooks = new_hooks(model, {14: 14336}, "block", "pre")
    assert act_equivalent(model, hooks) == pytest.approx(2 / 3 / 32, rel=1e-3)


def test_a_plan_of_different_layers_sums_over_them(mixtral):
    full = count_parameters(mixtral, LayerPlan((2, 2, 2))).active
    one = full - count_parameters(mixtral, LayerPlan((2, 1, 2))).active
    assert one == 3 * 32 * 48
    assert full - count_parameters(mixtral, LayerPlan((1, 1, 2))).active == 2 * one


def test_routes_act_and_agreement(mixture):
    blocks, base = blocks_of(3), plan_of(mixture)
    counts = {n: 4 for n, k in enumerate(base.ks) if k is not None}
    full = record_routes(mixture, blocks)
    assert set(act_per_layer(full, counts).values()) == {2.0}
    assert set(route_agreement(full, full).values()) == {1.0}
    with apply_plan(mixture, uniform_plan(base, 1)):
        cut = record_routes(mixture, blocks)
    assert set(act_per_layer(cut, counts).values()) == {1.0}
    first = min(counts)
    # The first mixture layer sees the same input, so its one expert is among the two.
    assert route_agreement(full, cut)[first] == 1.0


def test_agreement_counts_experts_that_the_full_model_ran_too():
    full = {0: torch.tensor([[0, 1], [2, 3], [1, 3]])}
    assert route_agreement(full, {0: torch.tensor([[1], [0], [3]])}) == {0: pytest.approx(2 / 3)}
    assert route_agreement(full, {0: torch.tensor([[1, 0], [0, 3], [0, 2]])}) == {0: pytest.approx(3 / 6)}


def test_the_load_of_a_perfect_and_of_a_broken_router():
    index = torch.tensor([[0, 1], [2, 3]])
    assert load_cv({0: index}, {0: 4}) == {0: 0.0}
    assert load_cv({0: torch.zeros(8, 1, dtype=torch.long)}, {0: 4})[0] == pytest.approx(3**0.5)
    # A slot left out is no load, and not executed.
    assert act_per_layer({0: torch.tensor([[0, 4], [4, 4]])}, {0: 4}) == {0: 0.5}
