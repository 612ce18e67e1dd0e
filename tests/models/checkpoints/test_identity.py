"""A base is more than its weights: what its config, its buffers and its tokenizer decide is compared too."""

import json
import logging
import re

import pytest
import torch
from tokenizers import Tokenizer

from freemoe.core.errors import ArtifactError
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.identity import IDENTITY, identify_base, identity_differences, require_base, settings_of
from freemoe.models.checkpoints.loading import load_base, load_tokenizer
from tests.gguf_files import tiny_llama, write_gguf
from tests.tiny import CASES, CHAT_TEMPLATE, save_base, tiny_model, tiny_tokenizer


def manifest(model, tokenizer=None, **more):
    """As a run writes it, through JSON."""
    said = {"base_model_name_or_path": "some/base", "base_fingerprint": fingerprint_model(model), **more}
    return json.loads(json.dumps({**said, IDENTITY: identify_base(model, tokenizer)}))


def config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_base_is_itself_in_memory_and_from_disk(case, tmp_path):
    model, tokenizer = tiny_model(case), load_tokenizer(save_base(tiny_model(case), tmp_path))
    said = manifest(model, tokenizer)
    require_base(said, model, tokenizer)
    for device in ("cpu", "disk"):
        require_base(said, *load_base(tmp_path, device=device))


def rope(kind, **values):
    return {"rope_parameters": {"rope_theta": 1e4, "rope_type": kind, **values}}


@pytest.mark.parametrize(
    ("case", "values"),
    [
        ("llama", rope("default", rope_theta=5e5)),
        ("llama", rope("linear", factor=2.0)),
        ("llama", {"rms_norm_eps": 1e-5}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"max_position_embeddings": 128}),
        ("llama", {"eos_token_id": 5}),
        ("llama", {"head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {"attn_logit_softcapping": 5.0}),
        ("gemma2", {"final_logit_softcapping": 5.0}),
        ("gemma2", {"query_pre_attn_scalar": 4}),
        ("gemma3", {"layer_types": ["full_attention", "full_attention"]}),
        ("gpt2", {"layer_norm_epsilon": 1e-3}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("phi", rope("default", partial_rotary_factor=0.25)),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("deepseek_v2", {"routed_scaling_factor": 3.0}),
        ("gpt_oss", {"sliding_window": 4}),
    ],
)
def test_a_setting_that_decides_the_answers(case, values, tmp_path):
    base, tokenizer = load_base(save_base(tiny_model(case), tmp_path), device="cpu")
    manifested = manifest(base, tokenizer)
    other, _ = load_base(config(tmp_path, **values), device="cpu")
    assert fingerprint_model(other) == fingerprint_model(base)
    with pytest.raises(ArtifactError, match=r"other settings: .*own config\.json") as caught:
        require_base(manifested, other, tokenizer)
    assert len(str(caught.value)) < 800
    for name, value in values.items():
        said = ".*" if isinstance(value, dict | list) else re.escape(repr(value))
        assert re.search(rf"{name}\S* is {said} and was ", str(caught.value))


def test_settings_of_a_part_of_the_model_count():
    base = tiny_model("gemma3_images")
    said = manifest(base)
    base.config.text_config.rms_norm_eps = 0.5
    with pytest.raises(ArtifactError, match=r"text_config\.rms_norm_eps is 0\.5"):
        require_base(said, base)


def test_what_decides_nothing_may_change(tmp_path):
    base, tokenizer = load_base(save_base(tiny_model("llama"), tmp_path), device="cpu")
    said = manifest(base, tokenizer)
    free = {"use_cache": False, "pad_token_id": 2, "attention_dropout": 0.1, "transformers_version": "4.1"}
    config(tmp_path, **free, dtype="bfloat16", initializer_range=1.0, _name_or_path="elsewhere")
    tokenizer.pad_token = "</s>"
    tokenizer.padding_side = "left"
    require_base(said, load_base(tmp_path, device="cpu", dtype="float32")[0], tokenizer)


def test_another_release_may_know_other_fields(llama):
    then, now = identify_base(llama, None), identify_base(llama, None)
    then["config"] = {**then["config"], "gone": 1}
    assert identity_differences(then, now) == ["gone is None and was 1"]
    then["transformers"] = "5.0.0"
    assert identity_differences(then, now) == []
    then["config"]["rms_norm_eps"] = 1e-5
    assert identity_differences(then, now) == ["rms_norm_eps is 1e-06 and was 1e-05"]


def test_stored_buffers_count():
    """A bias by which DeepSeek's router chooses is no parameter."""
    model = tiny_model("deepseek_v3")
    said = manifest(model)
    name, bias = next((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    with torch.no_grad():
        bias[0] += 1.0
    assert name not in dict(model.named_parameters())
    assert fingerprint_model(model) == said["base_fingerprint"]
    with pytest.raises(ArtifactError, match="stored buffers differ"):
        require_base(said, model)


def edited(edit):
    """A tokenizer whose description is changed."""
    tokenizer = tiny_tokenizer()
    said = json.loads(tokenizer.backend_tokenizer.to_str())
    edit(said)
    changed = Tokenizer.from_str(json.dumps(said))
    return type(tokenizer)(tokenizer_object=changed, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def swapped(said):
    vocabulary = said["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def merging(order):
    """A tokenizer that merges these pairs, the first one first."""
    pairs = [["Ġ", "t"], ["h", "e"], ["t", "h"], ["q", "z"], ["z", "q"]]

    def edit(said):
        vocabulary = said["model"]["vocab"]
        vocabulary.update({a + b: len(vocabulary) + n for n, (a, b) in enumerate(pairs)})
        said["model"]["merges"] = [pairs[n] for n in order]

    return edited(edit)


def ending(token):
    other = tiny_tokenizer()
    other.eos_token = token
    return other


@pytest.mark.parametrize(
    ("own", "other", "what"),
    [
        (tiny_tokenizer, lambda: edited(swapped), "vocabulary, way of splitting text"),
        (
            tiny_tokenizer,
            lambda: edited(lambda said: said.update(normalizer={"type": "Lowercase"})),
            "way of splitting text, way of putting text together",
        ),
        (tiny_tokenizer, lambda: ending("<s>"), "special tokens"),
        (lambda: merging([0, 1, 2, 3, 4]), lambda: merging([0, 1, 2, 4, 3]), "merges"),
    ],
)
def test_another_tokenizer_of_the_same_size(llama, own, other, what):
    said = manifest(llama, own())
    for same in (own(), None):
        require_base(said, llama, same)
    with pytest.raises(ArtifactError, match=rf"another tokenizer \(its {what}\)"):
        require_base(said, llama, other())


def test_the_chat_template_counts_where_it_was_used():
    model, talking = tiny_model("llama"), tiny_tokenizer()
    talking.chat_template = CHAT_TEMPLATE
    require_base(manifest(model, tiny_tokenizer()), model, talking)
    with pytest.raises(ArtifactError, match=r"another tokenizer \(its chat template\)"):
        require_base(manifest(model, tiny_tokenizer(), chat=True), model, talking)


def test_an_older_artefact_is_taken_with_a_word(llama, caplog):
    said = {"base_model_name_or_path": "some/base", "base_fingerprint": fingerprint_model(llama)}
    with caplog.at_level(logging.WARNING):
        require_base(said, llama, tiny_tokenizer())
    assert "its config (rope, norms, ...) and its tokenizer are could not be checked" in caplog.text
    with pytest.raises(ArtifactError, match="made for the base 'some/base'"):
        require_base(said, tiny_model("llama", seed=1))


def test_a_gguf_file_and_what_is_written_of_it_are_one_base(tmp_path):
    path = write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    base, tokenizer = load_base(path, device="cpu")
    said = manifest(base, tokenizer)
    require_base(said, *load_base(path, device="cpu"))
    base.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    require_base(said, *load_base(tmp_path / "folder", device="cpu"))


def test_settings_are_named_by_their_path():
    found = settings_of(tiny_model("llama").config)
    assert found["rope_parameters.rope_theta"] == 10000.0
    assert not {"use_cache", "dtype", "architectures", "attention_dropout"} & found.keys()
