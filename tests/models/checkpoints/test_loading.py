"""A base is what its files say, or it is refused: no gap is filled with random numbers."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from freemoe.assets import demo_model_path
from freemoe.core.errors import DataError
from freemoe.models.checkpoints.lending import provide_model
from freemoe.models.checkpoints.loading import load_base, load_tokenizer
from tests.tiny import VOCABULARY, tiny_model, tiny_tokenizer

UP = "model.layers.1.mlp.up_proj.weight"
LOG = "freemoe.models.checkpoints.checks.whole"
LLAMA_TYPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def edited(folder, edit=None, **config):
    """Change the tensors of a checkpoint, and values of its config."""
    if edit is not None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_values(folder / "config.json", **config)
    return folder


def set_values(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def llama(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma3", "mixtral", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_checkpoint_is_loaded_without_a_word(case, tied, tmp_path, caplog):
    model = tiny_model(case, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    assert same_weights(model, load_base(tmp_path / "model", device="cpu")[0])
    assert not [r for r in caplog.records if r.name == LOG]


def nan_bias(tensors):
    next(v for k, v in tensors.items() if k.endswith("correction_bias"))[:1].fill_(float("nan"))


EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def narrow(tensors):
    tensors[UP] = torch.zeros(40, 32)


def refusal(message, case="llama", edit=None, device="cpu", **config):
    """What is done to which checkpoint, where it is loaded, and what is said of it."""
    return case, edit, device, config, message


REFUSED = {
    "a missing tensor": refusal(
        r"is not whole: it lacks 1 tensor \(model\.layers\.1\.mlp\.up_proj\.weight\)\.", edit=lambda t: t.pop(UP)
    ),
    "a missing head": refusal(r"lacks 1 tensor \(lm_head\.weight\)", edit=lambda t: t.pop("lm_head.weight")),
    "fewer layers than the config says": refusal(
        r"lacks 18 tensors \(model\.layers\.2\.input_layernorm\.weight, .*, \.\.\.\)\.", num_hidden_layers=4
    ),
    **{
        f"more layers than the config says, {device}": refusal(
            r"layers have 9 tensors \(model\.layers\.1\..*more than its config\.json says\.",
            device=device,
            num_hidden_layers=1,
        )
        for device in ("cpu", "disk")
    },
    "another model type": refusal(
        r"lacks \d+ tensors \(.* also hold 2\d tensors \(.*Check model_type",
        model_type="gpt2",
        architectures=["GPT2LMHeadModel"],
    ),
    "a wrong shape": refusal(r"other shapes than 1 tensor \(.*up_proj\.weight \(40x32 in the file, 48", edit=narrow),
    "a shape on disk": refusal(r"up_proj\.weight' is 40x32 in its files and 48x32 by", edit=narrow, device="disk"),
    "many wrong shapes": refusal(r"other shapes than 6 tensors", intermediate_size=64),
    "an expert of a mixture less": refusal("could not be loaded", "mixtral", lambda t: t.pop(EXPERT)),
    "a narrow expert": refusal("could not be loaded", "mixtral", lambda t: t.update({EXPERT: torch.zeros(3, 5)})),
    "an expert of integers": refusal("as integers", "mixtral", lambda t: t.update({EXPERT: t[EXPERT].char()})),
    "a type of the same tensors": refusal(
        "model_type 'llama' and the class MistralForCausalLM of 'mistral'", "mistral", model_type="llama"
    ),
    "a type without biases": refusal("6 tensors .*k_proj.bias", "qwen2", **LLAMA_TYPE),
    "a type without norms": refusal("4 tensors .*k_norm.weight", "qwen3", **LLAMA_TYPE),
    "a setting that is no number": refusal("has rms_norm_eps = nan in its config", rms_norm_eps=float("nan")),
    "a negative norm": refusal(r"rms_norm_eps = -1\.0 .*allowed: 0 to 1", rms_norm_eps=-1.0),
    "a huge norm": refusal("rms_norm_eps", rms_norm_eps=1e30),
    "a rotation of nothing": refusal(
        r"rope_parameters\.rope_theta = 0\.0", rope_parameters={"rope_theta": 0.0, "rope_type": "default"}
    ),
    "a rotation scaled by nothing": refusal(
        r"rotary_emb\.inv_freq", rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 0.0}
    ),
    "no positions": refusal("max_position_embeddings = 0", max_position_embeddings=0),
    "a window below nothing": refusal("sliding_window = -3", "mistral", sliding_window=-3),
    "no experts per token": refusal("a token 0 of 4 experts", "mixtral", num_experts_per_tok=0),
    "too many experts per token": refusal("a token 9 of 4 experts", "mixtral", num_experts_per_tok=9),
    "NaN in a stored buffer": refusal(r"NaN or infinity in '.*e_score_correction_bias", "deepseek_v3", nan_bias),
    "quantised at loading": refusal(
        "could not be loaded", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_checkpoint_that_is_not_what_it_says_is_refused(what, tmp_path):
    case, edit, device, config, message = REFUSED[what]
    tiny_model(case).save_pretrained(tmp_path / "m")
    with pytest.raises(DataError, match=message) as caught:
        load_base(edited(tmp_path / "m", edit, **config), device=device)
    assert len(str(caught.value)) < 900


def test_what_nothing_asks_for_is_named(llama, caplog):
    whole = load_base(llama, device="cpu")[0]
    edited(llama, lambda t: t.update({"model.extra.weight": torch.zeros(3)}))
    with caplog.at_level(logging.WARNING, LOG):
        assert same_weights(whole, load_base(llama, device="cpu")[0])
    assert "holds 1 tensor (model.extra.weight) that its model has no place for" in caplog.text


def test_a_bare_decoder_is_told_too(llama):
    edited(llama, lambda t: [t.update({k.removeprefix("model."): t.pop(k)}) for k in list(t)], tie_word_embeddings=True)
    edited(llama, lambda t: t.pop("lm_head.weight"), architectures=["LlamaModel"])
    load_base(llama, device="cpu")
    edited(llama, num_hidden_layers=1)
    with pytest.raises(DataError, match=r"layers have 9 tensors \(layers\.1\."):
        load_base(llama, device="cpu")


def test_a_head_beside_tied_embeddings_is_told(llama, caplog):
    load_base(edited(llama, tie_word_embeddings=True), device="cpu")
    assert "head and embeddings are one, and its files hold two" in caplog.text


@pytest.mark.parametrize("name", [UP, "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize(("value", "device"), [(float("nan"), "cpu"), (float("inf"), "cpu"), (float("nan"), "disk")])
def test_a_number_that_is_none(llama, name, value, device):
    edited(llama, lambda t: t[name].view(-1)[-1:].fill_(value))
    with pytest.raises(DataError, match=f"NaN or infinity in '{name}'"):
        load_base(llama, device=device)


def test_a_dtype_in_which_a_weight_is_infinite(llama):
    edited(llama, lambda t: t[UP].view(-1)[3:4].fill_(1e6))
    load_base(llama, device="cpu")
    with pytest.raises(DataError, match=r"up_proj\.weight' \(as torch\.float16\).*--dtype float32"):
        load_base(llama, dtype="float16", device="cpu")


def test_a_lent_model_with_nan():
    model = tiny_model("llama")
    model.model.norm.weight.data[3] = float("nan")
    with provide_model("mine", model, None), pytest.raises(DataError, match=r"infinity in 'model\.norm\.weight'"):
        load_base("mine")


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("pickled", [False, True])
def test_integers_are_no_weights(llama, kind, pickled):
    edited(llama, lambda t: t.update({UP: (50 * t[UP]).to(kind)}))
    if pickled:
        torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
        (llama / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"stores 1 tensor \(model\.layers\.1\.mlp\.up_proj\.weight: \w+\) as integers"):
        load_base(llama, device="cpu")


def sharded(folder):
    tiny_model("llama").save_pretrained(folder, max_shard_size="20KB")
    return sorted(folder.glob("*.safetensors"))


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_tensor_in_two_shards(tmp_path):
    first, second, *_ = sharded(tmp_path)
    held, more = load_file(first), load_file(second)
    name = next(iter(held))
    save_file({**more, name: 2 * held[name]}, second, metadata={"format": "pt"})
    with pytest.raises(DataError, match=f"the tensor '{name}' in '{first.name}' and in '{second.name}'"):
        load_base(tmp_path, device="cpu")


def test_shards_of_swapped_names_are_the_same_model(tmp_path):
    first, second, *_ = sharded(tmp_path)
    third = first.rename(tmp_path / "x")
    second.rename(first)
    third.rename(second)
    assert same_weights(tiny_model("llama"), load_base(tmp_path, device="cpu")[0])


def test_two_models_in_one_folder_are_told(tmp_path, caplog):
    sharded(tmp_path / "m")
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "m" / "model.safetensors")
    load_base(tmp_path / "m", device="cpu")
    assert "both model.safetensors and model.safetensors.index.json; the first is read" in caplog.text


def test_a_tokenizer_of_a_larger_model(llama):
    tiny_tokenizer().save_pretrained(llama)
    load_base(llama, device="cpu")
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    edited(llama, lambda t: t.update({name: t[name][:100].clone() for name in ends}), vocab_size=100)
    with pytest.raises(DataError, match="embeddings for 100 tokens, and its tokenizer has 159 beyond them"):
        load_base(llama, device="cpu")


def test_tokens_that_were_added_may_lie_beyond_the_embeddings(llama):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<{i}>" for i in range(40)]})
    assert len(tokenizer) > VOCABULARY
    tokenizer.save_pretrained(llama)
    assert load_base(llama, device="cpu")[1] is not None


def without_files(folder):
    tiny_tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    set_values(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    return "turns ordinary text into no tokens at all"


def panicking(folder):
    """One at which its library panics."""
    held = json.loads((demo_model_path() / "tokenizer.json").read_text())
    del held["model"]["type"]
    held["model"]["continuing_subword_prefix"] = "report.html"
    (folder / "tokenizer.json").write_text(json.dumps(held))
    return "tokenizers fails on its files"


@pytest.mark.parametrize("harm", [without_files, panicking])
def test_a_tokenizer_that_cannot_be_used(harm, llama, caplog):
    said = harm(llama)
    assert load_base(llama, device="cpu")[1] is None
    assert said in caplog.text
    with pytest.raises(DataError, match=said):
        load_tokenizer(llama)


def test_whatever_a_library_raises_is_our_error(llama):
    (llama / "adapter_config.json").write_text(json.dumps({"adapter_type": "hookmoe"}))
    with pytest.raises(DataError, match="could not be loaded"):
        load_base(llama, device="cpu")
