"""Every family: which tensors are found, and what is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from freemoe.core.errors import FamilyError
from freemoe.models.spec import FAMILIES, family_of
from freemoe.models.weights import WeightMatrix, describe_weights, find_weights
from tests.tiny import CASES, tiny_model

QKVO = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
GATED = "mlp.gate_proj mlp.up_proj mlp.down_proj"
EXPERTS = "mlp.experts.gate_up_proj mlp.experts.down_proj"
SHARED = "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj mlp.shared_expert.down_proj"
MLA = "self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj self_attn.o_proj"
LLAMA = [f"{QKVO} {GATED}"] * 2

# Case -> (path of the layers, per layer the modules or fused parameters, number of matrices per sublayer).
FOUND = {
    "llama": ("model.layers", LLAMA, (8, 6)),
    "mistral": ("model.layers", LLAMA, (8, 6)),
    "qwen2": ("model.layers", LLAMA, (8, 6)),
    "qwen3": ("model.layers", LLAMA, (8, 6)),
    "gemma": ("model.layers", LLAMA, (8, 6)),
    "gemma2": ("model.layers", LLAMA, (8, 6)),
    "gemma3": ("model.layers", LLAMA, (8, 6)),
    "gemma3_images": ("model.language_model.layers", LLAMA, (8, 6)),
    "phi": ("model.layers", [f"{QKVO.replace('o_proj', 'dense')} mlp.fc1 mlp.fc2"] * 2, (8, 4)),
    "phi3": (
        "model.layers",
        ["self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj"] * 2,
        (4, 4),
    ),
    "gpt2": ("transformer.h", ["attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"] * 2, (4, 4)),
    "opt": ("model.decoder.layers", [f"{QKVO.replace('o_proj', 'out_proj')} fc1 fc2"] * 2, (8, 4)),
    "gpt_neox": (
        "gpt_neox.layers",
        ["attention.query_key_value attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h"] * 2,
        (4, 4),
    ),
    "mixtral": ("model.layers", [f"{QKVO} {EXPERTS}"] * 2, (8, 16)),
    "qwen2_moe": (
        "model.layers",
        [f"{QKVO} {SHARED} {EXPERTS}", f"{QKVO} {GATED}", f"{QKVO} {SHARED} {EXPERTS}"],
        (12, 25),
    ),
    "qwen3_moe": ("model.layers", [f"{QKVO} {GATED}", f"{QKVO} {EXPERTS}"], (8, 11)),
    "olmoe": ("model.layers", [f"{QKVO} {EXPERTS}"] * 2, (8, 16)),
    "deepseek_v2": (
        "model.layers",
        [
            f"self_attn.q_proj {MLA} {GATED}",
            *[f"self_attn.q_proj {MLA} {SHARED.replace('shared_expert', 'shared_experts')} {EXPERTS}"] * 2,
        ],
        (12, 25),
    ),
    "deepseek_v2_low_rank_queries": (
        "model.layers",
        [
            f"self_attn.q_a_proj self_attn.q_b_proj {MLA} {GATED}",
            *[
                f"self_attn.q_a_proj self_attn.q_b_proj {MLA} "
                f"{SHARED.replace('shared_expert', 'shared_experts')} {EXPERTS}"
            ]
            * 2,
        ],
        (15, 25),
    ),
    "deepseek_v3": (
        "model.layers",
        [
            f"self_attn.q_a_proj self_attn.q_b_proj {MLA} {GATED}",
            *[
                f"self_attn.q_a_proj self_attn.q_b_proj {MLA} "
                f"{SHARED.replace('shared_expert', 'shared_experts')} {EXPERTS}"
            ]
            * 2,
        ],
        (15, 25),
    ),
    "gpt_oss": ("model.layers", [f"{QKVO} {EXPERTS}"] * 2, (8, 16)),
}


def test_every_family_has_a_case():
    assert set(FOUND) == set(CASES)
    assert {family_of(tiny_model(case)).name for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("case", FOUND)
def test_what_is_found(case):
    path, per_layer, matrices = FOUND[case]
    model = tiny_model(case)
    weights = find_weights(model)
    expected = {
        f"{path}.{n}.{name}" + ("" if ".experts." in name else ".weight")
        for n, names in enumerate(per_layer)
        for name in names.split()
    }
    assert {w.name for w in weights} == expected
    assert len(weights) == len(expected)
    parameters = dict(model.named_parameters())
    assert all(parameters[w.name] is w.parameter for w in weights)
    # Layer by layer, attention first.
    order = [(w.layer, w.sublayer) for w in weights]
    assert order == sorted(order)
    seen = describe_weights(model)
    assert (seen.matrices["attention"], seen.matrices["mlp"]) == matrices
    assert seen.layers == len(per_layer)
    assert sum(seen.weights.values()) == sum(w.size for w in weights)
    assert 0.3 < seen.switchable_share < 0.8
    assert seen.family in str(seen)


@pytest.mark.parametrize("case", FOUND)
def test_canonical_view_is_what_the_model_multiplies_by(case):
    model = tiny_model(case)
    for weight in find_weights(model):
        view = weight.canonical_view()
        assert view.shape == weight.shape
        assert view.numel() == weight.size
        if not weight.is_fused:
            module = model.get_submodule(weight.name.removesuffix(".weight"))
            x = torch.randn(3, weight.num_columns)
            bias = module.bias if module.bias is not None else 0
            torch.testing.assert_close(x @ view[0].T + bias, module(x))
        view[-1, -1, 0] = 7.0
        index = torch.tensor([weight.size - weight.num_columns])
        assert weight.flat_memory()[weight.memory_indices(index)].item() == 7.0


def test_weights_with_one_tap_share_one_input():
    groups = {}
    for weight in find_weights(tiny_model("llama"), layers=(1, 2)):
        groups.setdefault(weight.tap, []).append(weight.name.split(".")[-2])
    assert list(groups.values()) == [
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]


def test_sublayers_and_layers_are_filters():
    model = tiny_model("llama", num_hidden_layers=3)
    everything = [w.name for w in find_weights(model)]
    attention = [w.name for w in find_weights(model, "attention")]
    mlp = [w.name for w in find_weights(model, "mlp")]
    assert sorted(attention + mlp) == sorted(everything)
    assert all("self_attn" in n for n in attention)
    assert {w.layer for w in find_weights(model, layers=(1, 3))} == {1, 2}
    # The same input has the same name, whatever else was asked for.
    assert {w.tap for w in find_weights(model, "mlp")} <= {w.tap for w in find_weights(model)}


@pytest.mark.parametrize("layers", [(0, 3), (-1, 1), (1, 1), (2, 1)])
def test_a_range_of_layers_must_exist(layers):
    with pytest.raises(FamilyError, match=r"has 2 decoder layers"):
        find_weights(tiny_model("llama"), layers=layers)


def test_unknown_sublayers():
    with pytest.raises(FamilyError, match=r"'ffn'.*attention, mlp, both"):
        find_weights(tiny_model("llama"), "ffn")


@pytest.mark.parametrize("case", CASES)
def test_a_model_without_a_head_is_understood(case):
    model = tiny_model(case)
    whole, body = find_weights(model), find_weights(model.base_model)
    assert [w.name for w in whole] == [f"{model.base_model_prefix}.{w.name}" for w in body]


def test_unknown_family_says_what_was_seen_and_what_to_do():
    model = tiny_model("llama")
    model.config.model_type = "mamba9"
    with pytest.raises(FamilyError) as error:
        find_weights(model)
    for part in ("LlamaForCausalLM", "mamba9", "model.layers", "transformer.h", "lm_head", "add a row"):
        assert part in str(error.value)
    with pytest.raises(FamilyError, match=r"Linear.*None"):
        find_weights(nn.Linear(2, 2))


def test_layers_in_another_place():
    model = tiny_model("llama")
    model.model.blocks = model.model.layers
    del model.model.layers
    with pytest.raises(FamilyError, match=r"no decoder layers stand at model\.layers.*model\.blocks"):
        find_weights(model)


def test_a_layer_without_linears():
    model = tiny_model("llama")
    model.model.layers[1] = nn.Module()
    with pytest.raises(FamilyError, match=r"No linear was found in decoder layer 1.*self_attn\.q_proj"):
        find_weights(model)


class QuantLinear(nn.Module):
    """What AWQ- or GPTQ-like backends put in place of a Linear."""

    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))


def test_quantised_bases_are_refused():
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj = QuantLinear()
    with pytest.raises(FamilyError, match=r"layers\.0\.mlp\.up_proj is a QuantLinear"):
        find_weights(model)
    model = tiny_model("llama")
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(FamilyError, match=r"up_proj is a Linear with weights of type torch\.int8"):
        find_weights(model)
    for dtype in (torch.float8_e4m3fn, torch.uint8):
        linear.weight = nn.Parameter(torch.zeros(48, 32).to(dtype), requires_grad=False)
        with pytest.raises(FamilyError, match="quantised"):
            find_weights(model)


def test_wrapped_weights_are_refused():
    model = tiny_model("llama")
    parametrize.register_parametrization(model.model.layers[1].mlp.down_proj, "weight", nn.Identity())
    with pytest.raises(FamilyError, match=r"layers\.1\.mlp\.down_proj.*without a plain parameter"):
        find_weights(model)


def test_meta_device_is_refused():
    with pytest.raises(FamilyError, match="meta device"):
        find_weights(tiny_model("llama").to("meta"))


def test_one_parameter_with_two_uses_is_refused():
    model = tiny_model("llama")
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(FamilyError, match=r"layers\.0\.mlp\.up_proj\.weight is one parameter with two uses"):
        find_weights(model)


def test_gates_are_where_the_row_says():
    x = torch.randint(3, 250, (1, 6))
    for case in CASES:
        model = tiny_model(case)
        family = family_of(model)
        assert (family.gate is None) == (family.experts is None)
        if family.gate is None:
            continue
        gate = model.get_submodule(f"{family.layers[0]}.{len(model.model.layers) - 1}.{family.gate.path}")
        assert getattr(gate, family.gate.top_k) == getattr(model.config, family.gate.config_key) == 2
        setattr(gate, family.gate.top_k, 1)
        seen = []
        gate.register_forward_hook(lambda *args, seen=seen: seen.append(args[-1]))
        with torch.no_grad():
            model(input_ids=x)
        logits, weights, index = seen[0]
        assert index.shape == weights.shape == (6, 1)
        assert logits.shape == (6, 4)


def test_weight_is_plain_data():
    weight = find_weights(tiny_model("gpt2"))[0]
    with pytest.raises(AttributeError):
        weight.layer = 3
    assert isinstance(weight, WeightMatrix)
    assert weight != copy.copy(weight)
