"""What the installed transformers gives to the names that freemoe takes from it, and what is said where one is gone."""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.integrations import moe

from freemoe.compat import transformers as compat
from tests.tiny import logits, tiny_model


def test_a_gguf_is_dequantised_where_it_has_to_be_asked_for(monkeypatch):

    if hasattr(transformers, "GgufConfig"):  # 5.16 has none yet
        assert compat.dequantise_options()["quantization_config"].dequantize is True
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    assert compat.dequantise_options() == {}


def test_marks_of_quantisation_go_whichever_there_are():
    model = SimpleNamespace(hf_quantizer=1, is_quantized=True, config=SimpleNamespace(quantization_config={}))
    compat.make_plain(model)
    assert vars(model) == {"is_quantized": False, "config": SimpleNamespace()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_function_of_attention(attention):
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    assert compat.attention_of(model.config) == attention


def test_a_model_that_is_to_be_filled():
    model = tiny_model("llama")
    new = compat.make_uninitialised(type(model), model.config, torch.bfloat16, "eager")
    assert type(new) is type(model)
    assert new.dtype == torch.bfloat16
    assert compat.attention_of(new.config) == "eager"
    new.load_state_dict(model.state_dict(), assign=True)
    new.set_attn_implementation(compat.attention_of(model.config))
    assert torch.equal(logits(new.eval()), logits(model))


def test_experts_run_by_a_function_of_ours():
    model = tiny_model("mixtral")
    own, plain, seen = compat.experts_backend(model.config), logits(model), []

    def nothing(experts, hidden, *_, **__):
        seen.append(experts)
        return torch.zeros_like(hidden)

    try:
        with compat.experts_run_by(model, "nothing", nothing):
            assert compat.experts_backend(model.config) == "nothing"
            assert not torch.equal(logits(model), plain)
            with compat.experts_run_by(model, "nothing", nothing):
                pass
            assert compat.experts_backend(model.config) == "nothing"
        assert len(seen) == model.config.num_hidden_layers
        assert compat.experts_backend(model.config) == own
        with pytest.raises(RuntimeError, match="on purpose"), compat.experts_run_by(model, "nothing", nothing):
            raise RuntimeError("on purpose")
        assert compat.experts_backend(model.config) == own
        assert torch.equal(logits(model), plain)
    finally:
        moe.ALL_EXPERTS_FUNCTIONS._global_mapping.pop("nothing")


def test_the_gate_of_experts_and_another_in_its_place():
    model = tiny_model("mixtral")
    experts = model.model.layers[0].mlp.experts
    both, plain = torch.randn(3, 2 * experts.down_proj.shape[-1]), logits(model)
    gate, up = both.chunk(2, dim=-1)
    assert torch.equal(compat.gate_of(experts)(both), experts.act_fn(gate) * up)
    outer, inner = [], []

    def listening(own, into):
        return lambda x: into.append(len(x)) or own(x)

    with compat.gate_replaced(experts, listening(compat.gate_of(experts), outer)):
        with compat.gate_replaced(experts, listening(compat.gate_of(experts), inner)):
            assert torch.equal(logits(model), plain)
        logits(model)
    assert len(outer) == 2 * len(inner) > 0
    assert "_apply_gate" not in vars(experts)
    with pytest.raises(RuntimeError, match="on purpose"), compat.gate_replaced(experts, print):
        raise RuntimeError("on purpose")
    assert torch.equal(logits(model), plain)
