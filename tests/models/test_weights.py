"""Every family: which tensors are found, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from freemoe.core.errors import FamilyError
from freemoe.models.spec import FAMILIES, family_of
from freemoe.models.weights import describe_weights, find_weights
from tests.tiny import CASES, model_and_weights, tiny_model

QKVO = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
GATED = "mlp.gate_proj mlp.up_proj mlp.down_proj"
EXPERTS = "mlp.experts.gate_up_proj mlp.experts.down_proj"
SHARED = "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj mlp.shared_expert.down_proj"
MLA = "self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj self_attn.o_proj"
LLAMA = [f"{QKVO} {GATED}"] * 2
ONE_RANK, LOW_RANK = f"self_attn.q_proj {MLA}", f"self_attn.q_a_proj self_attn.q_b_proj {MLA}"
SHARED_EXPERTS = SHARED.replace("shared_expert", "shared_experts") + f" {EXPERTS}"

PATHS = {
    "gemma3_images": "model.language_model.layers",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gpt_neox": "gpt_neox.layers",
}
# Case -> (per layer the modules or fused parameters, number of matrices per sublayer).
FOUND = {
    **dict.fromkeys(
        ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_images"], (LLAMA, (8, 6))
    ),
    "phi": ([f"{QKVO.replace('o_proj', 'dense')} mlp.fc1 mlp.fc2"] * 2, (8, 4)),
    "phi3": (["self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj"] * 2, (4, 4)),
    "gpt2": (["attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"] * 2, (4, 4)),
    "opt": ([f"{QKVO.replace('o_proj', 'out_proj')} fc1 fc2"] * 2, (8, 4)),
    "gpt_neox": (["attention.query_key_value attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h"] * 2, (4, 4)),
    **dict.fromkeys(["mixtral", "olmoe", "gpt_oss"], ([f"{QKVO} {EXPERTS}"] * 2, (8, 16))),
    "qwen2_moe": ([f"{QKVO} {SHARED} {EXPERTS}", LLAMA[0], f"{QKVO} {SHARED} {EXPERTS}"], (12, 25)),
    "qwen3_moe": ([LLAMA[0], f"{QKVO} {EXPERTS}"], (8, 11)),
    "deepseek_v2": ([f"{ONE_RANK} {GATED}", *[f"{ONE_RANK} {SHARED_EXPERTS}"] * 2], (12, 25)),
    **dict.fromkeys(
        ["deepseek_v2_low_rank_queries", "deepseek_v3"],
        ([f"{LOW_RANK} {GATED}", *[f"{LOW_RANK} {SHARED_EXPERTS}"] * 2], (15, 25)),
    ),
}


def test_every_family_has_a_case():
    assert set(FOUND) == set(CASES)
    assert {family_of(tiny_model(case)).name for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("case", FOUND)
def test_what_is_found(case):
    (per_layer, matrices), path = FOUND[case], PATHS.get(case, "model.layers")
    model, weights = model_and_weights(case)
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
    assert (seen["matrices"]["attention"], seen["matrices"]["mlp"]) == matrices
    assert seen["decoder_layers"] == len(per_layer)
    assert sum(seen["switchable_weights"].values()) == sum(w.size for w in weights)
    assert 0.3 < seen["switchable_share"] < 0.8
    assert seen["family"] == family_of(model).name


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
    wanted = "q_proj k_proj v_proj, o_proj, gate_proj up_proj, down_proj"
    assert list(groups.values()) == [names.split() for names in wanted.split(", ")]


def test_sublayers_and_layers_are_filters():
    model = tiny_model("llama", num_hidden_layers=3)
    everything = [w.name for w in find_weights(model)]
    attention, mlp = ([w.name for w in find_weights(model, part)] for part in ("attention", "mlp"))
    assert sorted(attention + mlp) == sorted(everything)
    assert all("self_attn" in n for n in attention)
    assert {w.layer for w in find_weights(model, layers=(1, 3))} == {1, 2}
    # The same input has the same name, whatever else was asked for.
    assert {w.tap for w in find_weights(model, "mlp")} <= {w.tap for w in find_weights(model)}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        *(({"layers": layers}, "has 2 decoder layers") for layers in [(0, 3), (-1, 1), (1, 1), (2, 1)]),
        ({"sublayers": "ffn"}, r"'ffn'.*attention, mlp, both"),
    ],
)
def test_what_is_asked_for_must_exist(asked, said):
    with pytest.raises(FamilyError, match=said):
        find_weights(tiny_model("llama"), **asked)


@pytest.mark.parametrize("case", CASES)
def test_a_model_without_a_head_is_understood(case):
    model = tiny_model(case)
    whole, body = find_weights(model), find_weights(model.base_model)
    assert [w.name for w in whole] == [f"{model.base_model_prefix}.{w.name}" for w in body]


def test_unknown_family_says_what_was_seen_and_what_to_do(llama):
    llama.config.model_type = "mamba9"
    with pytest.raises(FamilyError) as error:
        find_weights(llama)
    for part in ("LlamaForCausalLM", "mamba9", "model.layers", "transformer.h", "lm_head", "add a row"):
        assert part in str(error.value)
    with pytest.raises(FamilyError, match=r"Linear.*None"):
        find_weights(nn.Linear(2, 2))


def move_layers(model):
    model.model.blocks = model.model.layers
    del model.model.layers


def in_up_proj(change):
    """Changes the MLP of the first layer."""
    return lambda model: change(model.model.layers[0].mlp)


def set_type(dtype):
    def change(mlp):
        mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.to(dtype), requires_grad=False)

    return in_up_proj(change)


REFUSED = {
    "layers in another place": (move_layers, r"no decoder layers stand at model\.layers.*model\.blocks"),
    "a layer without linears": (
        lambda m: setattr(m.model, "layers", nn.ModuleList([m.model.layers[0], nn.Module()])),
        r"No linear was found in decoder layer 1.*self_attn\.q_proj",
    ),
    "a quantised module": (
        in_up_proj(lambda mlp: setattr(mlp, "up_proj", QuantLinear())),
        r"layers\.0\.mlp\.up_proj is a QuantLinear",
    ),
    "int8": (set_type(torch.int8), r"up_proj is a Linear with weights of type torch\.int8"),
    "fp8": (set_type(torch.float8_e4m3fn), "quantised"),
    "a wrapped weight": (
        in_up_proj(lambda mlp: parametrize.register_parametrization(mlp.down_proj, "weight", nn.Identity())),
        r"layers\.0\.mlp\.down_proj.*without a plain parameter",
    ),
    "the meta device": (lambda m: m.to("meta"), "meta device"),
    "one parameter with two uses": (
        lambda m: setattr(m.model.layers[1].mlp.up_proj, "weight", m.model.layers[0].mlp.up_proj.weight),
        r"layers\.0\.mlp\.up_proj\.weight is one parameter with two uses",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_switched_is_refused(llama, case):
    change, message = REFUSED[case]
    change(llama)
    with pytest.raises(FamilyError, match=message):
        find_weights(llama)


class QuantLinear(nn.Module):
    """What AWQ- or GPTQ-like backends put in place of a Linear."""

    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))


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
