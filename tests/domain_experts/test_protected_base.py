"""The base below its experts: not edited through them, not copied with an expert's zeros, its own again when they go."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from freemoe import FreeMoE
from freemoe.core.errors import DataError
from freemoe.models.weights import find_weights
from tests.domain_experts.test_mixture import bits, unchanged
from tests.domain_experts.test_threads import experts_on
from tests.tiny import tiny_model


@pytest.fixture
def model():
    return tiny_model("llama", num_hidden_layers=1)


def host(model):
    return FreeMoE(model, experts_on(model, "ab"))


@pytest.mark.parametrize("cyclic", [False, True])
def test_a_mixture_that_goes_leaves_the_base(model, cyclic):
    before = bits(model)
    moe = host(model)
    moe.set_expert("a")
    assert not unchanged(model, before)
    if cyclic:
        moe.__dict__["me"] = moe
    del moe
    gc.collect()
    assert unchanged(model, before)
    copy.deepcopy(model)


def test_a_mixture_that_goes_leaves_another_s_expert(model):
    before, first, second = bits(model), host(model), host(model)
    first.set_expert("a")
    second.set_expert("b")
    there = bits(model)
    del first
    gc.collect()
    assert unchanged(model, there)
    with second.expert("a"):
        third = host(model)
        third.set_expert("b")
        there = bits(model)
        del third
        gc.collect()
        assert unchanged(model, there)
    del second
    gc.collect()
    assert unchanged(model, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda model, folder: model.save_pretrained(folder),
        lambda model, folder: copy.deepcopy(model),
        lambda model, folder: copy.deepcopy({"inside": [model]}),
        lambda model, folder: pickle.dumps(model),
        lambda model, folder: torch.save(model, folder / "whole.pt"),
    ],
)
def test_a_base_is_not_copied_with_an_expert_in_it(model, tmp_path, make):
    moe, methods = host(model), dict(model.__dict__)
    moe.set_expert("a")
    with moe.expert("b"), pytest.raises(DataError, match=r"moe\.expert\('base'\).*merge_and_save"):
        make(model, tmp_path)
    with moe.expert("base"):
        make(model, tmp_path)
        assert model.__dict__ == methods
    with pytest.raises(DataError, match="An expert is switched in"):
        make(model, tmp_path)
    moe.set_expert(None)
    make(model, tmp_path)
    assert model.__dict__ == methods


def test_what_is_wanted_is_still_written(model, tmp_path):
    """The expert as a plain model, and the base, while another expert is switched in; a copy test_hosting.py shows."""
    moe, before = host(model), bits(model)
    moe.set_expert("b")
    merged = AutoModelForCausalLM.from_pretrained(moe.merge_and_save("a", tmp_path / "merged"))
    with moe.expert("base"):
        model.save_pretrained(tmp_path / "base")
    assert unchanged(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), before)
    with moe.expert("a"):
        assert unchanged(model, bits(merged))


@pytest.mark.parametrize("new", ["Parameter", "data", "assigned"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_a_parameter_that_is_replaced_under_an_expert_is_the_base_s_afterwards(case, new):
    model = tiny_model(case)
    moe, before = host(model), bits(model)
    moe.set_expert("a")
    there = bits(model)
    if new == "assigned":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    for weight in find_weights(model)[1:] if new != "assigned" else ():
        if new == "data":
            weight.parameter.data = weight.parameter.data.clone()
        else:
            setattr(weight.module, weight.param_name, nn.Parameter(weight.parameter.detach().clone()))
    moe.set_expert(None)
    assert unchanged(model, before)
    moe.set_expert("a")
    assert unchanged(model, there)
    moe.set_expert("b")
    moe.set_expert(None)
    assert unchanged(model, before)


EDITS = [
    "load_adapter", "add_adapter", "set_adapter", "delete_adapter", "enable_adapters", "disable_adapters", "resize_token_embeddings",
    "set_input_embeddings", "set_output_embeddings", "set_decoder", "init_weights", "tie_weights", "post_init", "dequantize",
    "save_distributed_checkpoint", "enable_peft_hotswap", "initialize_weights", "resize_position_embeddings",
]  # fmt: skip
READS = [
    "get_input_embeddings", "get_output_embeddings", "num_parameters", "get_memory_footprint", "get_decoder",
    "gradient_checkpointing_enable", "enable_input_require_grads", "set_attn_implementation", "compute_transition_scores",
    "prepare_inputs_for_generation", "add_model_tags", "lm_head", "base_model", "dtype", "generation_config", "config", "device",
    "main_input_name", "name_or_path",
]  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_what_would_edit_the_base_is_not_done_through_its_experts(model, name):
    moe, before = host(model), bits(model)
    assert hasattr(moe, name)
    with pytest.raises(DataError, match=rf"{name} would edit the base, .*merge_and_unload\(NAME\)"):
        getattr(moe, name)("any", rank=8)
    assert unchanged(model, before)


@pytest.mark.parametrize("name", READS)
def test_what_only_reads_it_is_the_base_s(model, name):
    mine, its = getattr(host(model), name), getattr(model, name)
    assert mine is its or mine == its


def test_of_all_that_a_model_can_do_what_is_left_to_it_was_looked_at(model):
    """A method that a later transformers adds is looked at once, and named here or refused."""
    import warnings

    looked_at = {
        "activation_checkpointing_disable", "activation_checkpointing_enable", "active_adapters", "adjust_generation_fn",
        "barrier_after_gathered_checkpoint_save", "config_class", "continuous_batching_context_manager",
        "destroy_cached_continuous_batching_manager", "disable_input_require_grads", "gather_sharded_state_dict_for_save",
        "generate_batch", "generation_config_class", "gradient_checkpointing_disable", "heal_tokens", "init_continuous_batching",
        "is_backend_compatible", "is_custom_code", "is_remote_code", "load_custom_generate", "loss_function",
        "mark_tied_weights_as_initialized", "named_non_persistent_buffers", "register_for_auto_class", "retrieve_modules_from_names",
        "set_experts_implementation", "set_use_kernels", "should_save_on_this_rank", "warn_if_padding_and_no_attention_mask",
    }  # fmt: skip
    moe, loose = host(model), []
    for name in set(dir(model)) - set(dir(moe)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = getattr(moe, name)
        if name[0] != "_" and callable(found) and not isinstance(found, nn.Module) and getattr(model, name) == found:
            loose.append(name)
    assert not {n for n in loose if not n.startswith("get_")} - looked_at - {*READS}
