"""Every exported form computes what the masks on the dense model compute."""

import itertools
from dataclasses import replace

import pytest
import torch

from freemoe.kernels.attention import LEAST
from freemoe.models.sublayers import CONVERTIBLE, find_sublayers
from freemoe.tomoe import modules
from freemoe.tomoe.export import build_converted_model
from freemoe.tomoe.modeling import MODELS, MODES
from freemoe.tomoe.structures.masked import apply_structure
from tests.tiny import tiny_model
from tests.tomoe.random_structures import random_structure

CLOSE = {"rtol": 0, "atol": 1e-5}
# Left padding, and tokens enough that every expert has some.
IDS = torch.randint(3, 200, (3, 21), generator=torch.Generator().manual_seed(1))
PADDING = torch.ones_like(IDS)
PADDING[0, :6] = 0
PADDING[1, :1] = 0
POSITIONS = (PADDING.cumsum(-1) - 1).clamp(min=0)
SEEN = PADDING.bool()


def through(model, way):
    """The model, made to compute many tokens in this way."""
    for layer in model.model.layers:
        plan = layer.mlp.plan()
        plan.grouped, plan.few = 1 if way == "grouped" else 10**9, 10**9
    return model


def logits(model):
    return model(input_ids=IDS, attention_mask=PADDING, position_ids=POSITIONS).logits[SEEN]


def decoded(model, prompt, **inputs):
    """Logits of a prompt and then of one token after the other, with a cache."""
    cache, parts = None, []
    edges = [0, prompt, *range(prompt + 1, inputs["input_ids"].shape[1] + 1)]
    for begin, end in itertools.pairwise(edges):
        output = model(
            input_ids=inputs["input_ids"][:, begin:end],
            attention_mask=inputs["attention_mask"][:, :end],
            position_ids=inputs["position_ids"][:, begin:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def test_the_table_has_every_family_that_can_be_converted():
    assert tuple(MODELS) == CONVERTIBLE


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True], ids=["gate", "static"])
@pytest.mark.parametrize("family", CONVERTIBLE)
def test_every_form_equals_the_masks(family, static):
    model = tiny_model(family)
    structure = random_structure(model, static=static)
    with apply_structure(model, structure):
        want = logits(model)
    assert (want - logits(model)).abs().max() > 0.1
    for mode in MODES:
        for way in ("grouped", "masked"):
            got = logits(through(build_converted_model(model, structure, mode), way))
            torch.testing.assert_close(got, want, **CLOSE, msg=lambda m, mode=mode, way=way: f"{mode}, {way}: {m}")


@torch.no_grad()
@pytest.mark.parametrize("family", CONVERTIBLE)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_decoding_with_a_cache_equals_prefill(family, attention):
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    structure = random_structure(model)
    new = build_converted_model(model, structure)
    assert new.config._attn_implementation == attention
    batch = {"input_ids": IDS, "attention_mask": PADDING, "position_ids": POSITIONS}
    torch.testing.assert_close(decoded(new, 12, **batch)[SEEN], logits(new), **CLOSE)
    # One sequence: every decoded token is a batch of one row, which has a way of its own.
    single = {name: value[2:] for name, value in batch.items()}
    with apply_structure(model, structure):
        want = decoded(model, 12, **single)
    torch.testing.assert_close(decoded(new, 12, **single), want, **CLOSE)


@torch.no_grad()
def test_sliding_windows_pass_through():
    for family, own in (
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}),
    ):
        model = tiny_model(family, **own)
        structure = random_structure(model)
        with apply_structure(model, structure):
            want = logits(model)
        with apply_structure(wide := tiny_model(family), structure):
            assert (logits(wide) - want).abs().max() > 1e-2
        new = build_converted_model(model, structure)
        torch.testing.assert_close(logits(new), want, **CLOSE)
        batch = {"input_ids": IDS, "attention_mask": PADDING, "position_ids": POSITIONS}
        torch.testing.assert_close(decoded(new, 12, **batch)[SEEN], want, **CLOSE)


@torch.no_grad()
def test_long_prompts_have_an_attention_of_their_own(monkeypatch):
    model = tiny_model("llama", max_position_embeddings=1024)
    few = torch.tensor([True, False, True, False])
    structure = [replace(layer, qk=few) for layer in random_structure(model)]
    new = build_converted_model(model, structure)
    ids = torch.randint(3, 200, (2, LEAST + 5), generator=torch.Generator().manual_seed(0))
    with apply_structure(model, structure):
        want = model(ids).logits
    seen = []
    own = modules.narrow_causal
    monkeypatch.setattr(modules, "narrow_causal", lambda *args: seen.append(1) or own(*args))
    torch.testing.assert_close(new(ids).logits, want, **CLOSE)
    assert len(seen) == 2
    # Padding is a mask, and masks are the fused attention's.
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    with apply_structure(model, structure):
        want = model(ids, attention_mask=padding).logits
    torch.testing.assert_close(new(ids, attention_mask=padding).logits[1], want[1], **CLOSE)
    torch.testing.assert_close(new(ids, attention_mask=padding).logits[0, 7:], want[0, 7:], **CLOSE)
    assert len(seen) == 2


@torch.no_grad()
@pytest.mark.parametrize("family", CONVERTIBLE)
def test_widths_are_removed_and_not_masked(family):
    model = tiny_model(family)
    structure = random_structure(model, static=True)
    new = build_converted_model(model, structure)
    for layer, sublayer, own in zip(new.model.layers, find_sublayers(model), structure, strict=True):
        kept = int(sublayer.rotary.expand_bits(own.qk.float()).sum())
        assert layer.self_attn.q_proj.out_features == sublayer.heads * kept
        assert layer.self_attn.k_proj.out_features == sublayer.kv_heads * kept
        assert layer.self_attn.v_proj.out_features == sublayer.kv_heads * int(own.vo.sum())
        assert layer.self_attn.o_proj.weight.shape == (sublayer.heads * int(own.vo.sum()), 32)
        assert layer.mlp.up.shape == (len(sublayer.up), own.union_width, 32)
        assert layer.mlp.down.shape == (own.union_width, 32)


@torch.no_grad()
def test_every_token_keeps_exactly_k_value_dimensions():
    model = tiny_model("llama")
    structure = random_structure(model)
    # Equal scores everywhere: ties must not widen the choice.
    gate = structure[0].vo
    structure[0] = replace(structure[0], vo=replace(gate, decode=torch.zeros_like(gate.decode), offset=torch.zeros(8)))
    new = build_converted_model(model, structure)
    x = torch.randn(5, 32)
    for layer, own in zip(new.model.layers, structure, strict=True):
        assert layer.self_attn.value_gate(x).sum(-1).tolist() == [own.value_width] * 5


def test_inference_mode_leaves_nothing_behind():
    model = tiny_model("llama")
    structure = random_structure(model)
    for way in ("grouped", "masked"):
        new = through(build_converted_model(model, structure), way)
        with torch.inference_mode():
            first = logits(new)
        with torch.no_grad():
            torch.testing.assert_close(logits(new), first.clone(), **CLOSE)
        logits(new).sum().backward()


def test_gradients_equal_the_masked_models():
    model = tiny_model("llama")
    structure = random_structure(model)
    new = build_converted_model(model, structure)
    with apply_structure(model, structure):
        logits(model).logsumexp(-1).mean().backward()
    logits(new).logsumexp(-1).mean().backward()
    torch.testing.assert_close(
        new.model.embed_tokens.weight.grad, model.model.embed_tokens.weight.grad, rtol=0, atol=1e-5
    )
    assert new.model.layers[0].mlp.up.grad is not None


@torch.no_grad()
def test_attentions_and_hidden_states_are_recorded():
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    new = build_converted_model(model, random_structure(model))
    found = new(IDS, output_attentions=True, output_hidden_states=True)
    assert [tuple(a.shape) for a in found.attentions] == [(3, 4, 21, 21)] * 2
    assert len(found.hidden_states) == 3


@torch.no_grad()
def test_new_index_lists_are_noticed():
    model = tiny_model("llama")
    first, second = (build_converted_model(model, random_structure(model, share=1.0)) for _ in range(2))
    logits(first)
    lists = first.state_dict()["model.layers.0.mlp.experts"]
    fewer = first.state_dict() | {"model.layers.0.mlp.experts": lists.masked_fill(lists > 9, -1)}
    for way in ("grouped", "masked"):
        first.load_state_dict(fewer)
        second.load_state_dict(fewer)
        torch.testing.assert_close(logits(through(first, way)), logits(through(second, way)), **CLOSE)


@pytest.mark.slow
@torch.no_grad()
def test_compiles_as_one_graph():
    model = tiny_model("llama", num_hidden_layers=1)
    structure = random_structure(model)
    new = build_converted_model(model, structure)
    compiled = torch.compile(new.model, fullgraph=True, backend="aot_eager")
    want = new.model(IDS, use_cache=False).last_hidden_state
    torch.testing.assert_close(compiled(IDS, use_cache=False).last_hidden_state, want, **CLOSE)
