"""Whoever put a forward of his own on a module finds it there behind every block of ours that exchanges forwards."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from freemoe.domain_experts.purify.gradients import backward, gradients_to
from freemoe.evals.engine.output_head import output_replayed
from freemoe.hookmoe.decoding.quick import quick_decoding
from freemoe.hookmoe.hooks.upper_half import checkpoint_layers, start_at_layer
from freemoe.models.hooks import replace_method
from freemoe.models.weights import find_weights
from tests.domain_experts.purify.test_greedy import batches
from tests.tiny import tiny_model

IDS = torch.arange(5, 13)[None]


class Counting(ModelHook):
    """Stands for what moves a layer of a split model to its device."""

    def __init__(self):
        self.calls = []

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append(module)
        return args, kwargs


def hooked_model(case):
    """A model all of whose layers, and whose head, have a hook of accelerate's."""
    model = tiny_model(case)
    counting, modules = Counting(), [*model.model.layers, model.lm_head]
    for module in modules:
        add_hook_to_module(module, counting)
    return model, counting, modules


BLOCKS = {
    "layers checkpointed": lambda m: gradients_to(m, find_weights(m)[:1], lambda *_: None, checkpointing=True),
    "layers made again": checkpoint_layers,
    "layers passing on": lambda m: start_at_layer(m, 1),
    "decoder answering again": lambda m: output_replayed(m.model.layers[0], IDS),
    "decoding": quick_decoding,
    "forward exchanged": lambda m: replace_method(m.model.layers[0], lambda x, *_, **__: x),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_the_forward_of_another_owner_stays(block):
    model, counting, modules = hooked_model("mixtral")
    want = model(IDS).logits
    before, forwards = len(counting.calls), [vars(module)["forward"] for module in modules]
    assert before == len(modules)
    with BLOCKS[block](model), BLOCKS[block](model):
        pass
    assert [vars(module).get("forward") for module in modules] == forwards
    assert torch.equal(model(IDS).logits, want)
    assert len(counting.calls) == 2 * before


def test_a_gradient_pass_goes_through_the_forward_of_another_owner():
    model, counting, _ = hooked_model("llama")
    with gradients_to(model, find_weights(model)[:1], lambda *_: None, checkpointing=True):
        counting.calls.clear()
        backward(model, batches(0)[:1])
    # Once forwards, and once again in the backward pass.
    assert [counting.calls.count(layer) for layer in model.model.layers] == [2, 2]
