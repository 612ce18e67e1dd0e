"""A GGUF file through the commands: built on, read, merged, and written as a GGUF again whose off weights are zero."""

import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freemoe.core.errors import ArtifactError, DataError, NumericError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.pipeline import build
from freemoe.models.checkpoints.gguf_writing import write_gguf as write_back
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.weights import find_weights
from freemoe.recipes import recipe_from
from tests.domain_experts.conftest import choice_rows, write_jsonl
from tests.gguf_files import gguf_tensors, tiny_llama, write_gguf
from tests.masks import indices_of
from tests.tiny import save_base, tiny_model

EXPERT = "law/all"
TEXT = "the one on the thin 12 lines"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A quantised tiny Llama, and experts built on it."""
    root = tmp_path_factory.mktemp("gguf")
    base = write_gguf(tiny_llama(tied=True), root / "base.gguf", "Q4_1")
    law = write_jsonl(root / "law.jsonl", choice_rows())
    data = {
        "model": str(base),
        "domains": {"law": [str(law)]},
        "output": str(root / "out"),
        "device": "cpu",
        "subdomains": {"by": "none"},
        "bands": {"start": 0.25, "end": 0.5, "step": 0.25, "ratio": 0.25},
        "search": {"metrics": ["wanda"], "method": "exhaustive", "select": "argmax"},
        "evidence": {"controls": 0, "oracle": False},
    }
    out = build(recipe_from(data))
    moe = FreeMoE.from_pretrained(None, out, device="cpu")
    assert EXPERT in moe.experts
    return SimpleNamespace(root=root, base=base, law=law, out=out, off=indices_of(moe.expert_mask(EXPERT)))


def merged(world, model):
    """What a base's tensors must be when the expert's weights are zero."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for weight in find_weights(model):
        state[weight.name].view(-1)[world.off[weight.name]] = 0
    return state


def test_the_artefact_says_what_its_base_was(world, freemoe):
    result = json.loads((world.out / "result.json").read_text())
    assert result["base"]["origin"] == "dequantised from GGUF Q4_1 to float32"
    assert "dequantised from GGUF Q4_1 to float32" in (world.out / "README.md").read_text()
    done = freemoe("inspect", str(world.out), "--base", str(world.base)).ok()
    assert "fits base: yes" in done.out
    done = freemoe("inspect", str(world.base)).ok()
    assert "origin: dequantised from GGUF Q4_1 to float32" in done.out
    assert "decoder layers: 2" in done.out
    assert "tokens" in done.out


def test_other_commands_take_it_too(world, freemoe):
    domain = ["--domain", f"law={world.law}", "--limit", "4", "--device", "cpu", "--json"]
    plain, expert = (freemoe("eval", str(model), *domain).json["domains"][0] for model in (world.base, world.out))
    assert plain["rows"]["base"]["score"] == expert["rows"]["base"]["score"]
    freemoe("generate", str(world.out), "the", "--expert", EXPERT, "--max-new-tokens", "3", "--device", "cpu").ok()


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_merged_into_a_gguf_and_read_again(world, kind, freemoe, tmp_path):
    found = freemoe("merge", str(world.out), EXPERT, "-o", str(tmp_path / "merged"), "--gguf", kind, "--json").json
    assert found["weights_off"] == sum(len(v) for v in world.off.values()) > 1000
    wanted = merged(world, load_base(world.base, device="cpu")[0])

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(plain[k], v) for k, v in wanted.items())
    file = tmp_path / "merged" / f"model-{kind}.gguf"
    assert found["gguf"] == str(file)
    again, tokenizer = load_base(file, device="cpu")
    for name, values in wanted.items():
        got = again.state_dict()[name]
        # Every weight that is off is exactly zero again, and nothing is far from what it was.
        assert bool((got[values == 0] == 0).all())
        if name in world.off:
            assert bool((got.view(-1)[world.off[name]] == 0).all())
            assert len(world.off[name])
        tolerance = {"f32": 0, "f16": 2**-11 * values.abs(), "q8_0": values.abs().max() / 127}[kind]
        assert bool(((got - values).abs() <= tolerance).all()), name
    original = AutoTokenizer.from_pretrained(world.root, gguf_file="base.gguf")
    for other in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "merged")):
        assert other(TEXT)["input_ids"] == original(TEXT)["input_ids"]


def test_the_file_is_the_base_but_for_the_tensors(world, tmp_path):
    model, _ = load_base(world.base, device="cpu")
    write_back(model, tmp_path / "again.gguf", "f32", world.base)
    old, new = gguf.GGUFReader(world.base), gguf.GGUFReader(tmp_path / "again.gguf")
    for key, field in old.fields.items():
        if key not in ("GGUF.kv_count", "general.file_type"):
            assert new.fields[key].contents() == field.contents(), key
            assert new.fields[key].types == field.types, key
    assert new.fields["general.file_type"].contents() == gguf.LlamaFileType.ALL_F32
    assert [t.name for t in new.tensors] == [t.name for t in old.tensors]
    # The reference, written tensor by tensor, has the same rows in the same places.
    for name, values in gguf_tensors(model).items():
        found = next(t for t in new.tensors if t.name == name)
        assert np.array_equal(found.data, values), name


def test_odd_rows_are_stored_as_f16(tmp_path):
    base = write_gguf(tiny_model("llama"), tmp_path / "base.gguf", "F16")  # 48 neurons: no multiple of 32
    model, _ = load_base(base, device="cpu")
    write_back(model, tmp_path / "out.gguf", "q8_0", base)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == types["token_embd.weight"] == "Q8_0"
    assert types["output_norm.weight"] == "F32"
    assert load_base(tmp_path / "out.gguf", device="cpu")


def test_what_cannot_be_written(tmp_path):
    base = write_gguf(tiny_llama(), tmp_path / "base.gguf")
    model, _ = load_base(base, device="cpu")
    with pytest.raises(DataError, match="file type is 'q4_0'; allowed: f32, f16, q8_0"):
        write_back(model, tmp_path / "out.gguf", "q4_0", base)
    # A model whose tensors are not those of the file, as if it had another layout.
    other = tiny_llama()
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight.copy_(other.model.layers[1].self_attn.q_proj.weight.flip(0))
    with pytest.raises(DataError, match=r"'blk\.1\.attn_q\.weight' is laid out in a way"):
        write_back(other, tmp_path / "out.gguf", "f32", base)
    with pytest.raises(DataError, match=r"'blk\.2\..*' is laid out in a way"):
        write_back(tiny_model("llama", num_hidden_layers=3, intermediate_size=64), tmp_path / "out.gguf", "f32", base)
    large = tiny_llama()
    with torch.no_grad():
        large.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    large_base = write_gguf(large, tmp_path / "large.gguf")
    with pytest.raises(NumericError, match=r"'blk\.0\.ffn_up\.weight' holds 1e\+05; f16 ends at 65504\. Write it with"):
        write_back(load_base(large_base, device="cpu")[0], tmp_path / "out.gguf", "f16", large_base)


def test_refused_before_anything_is_loaded(world, freemoe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("freemoe.domain_experts.mixture.load_own_base", lambda *a: pytest.fail("the base was loaded"))
    out = str(world.out)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").write_text("x")
    freemoe("merge", out, "law/al").refused("Unknown expert 'law/al'. Did you mean 'law/all'?", "Known: base")
    freemoe("merge", out, "auto").refused("Unknown expert 'auto'", "one expert")
    freemoe("merge", out, EXPERT, "-o", "there").refused("'there' exists already", "--overwrite")
    freemoe("merge", out, EXPERT, "--gguf", "q4_k").refused("is 'q4_k'; allowed: f32, f16, q8_0")
    freemoe("merge", out, EXPERT, "--gguf", "f16", "--base", "folder").refused("base 'folder' is none")
    freemoe("merge", out, EXPERT, "-o", str(world.root), "--overwrite").refused("base.gguf", "which is merged")
    freemoe("merge", "nothing", EXPERT).refused("is not an artefact")
    done = freemoe("merge", out, EXPERT, "--gguf", "f16", "--dry-run", "--json")
    assert done.json["gguf"] == "freemoe-merged/model-f16.gguf"
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_refused_with_another_base(world, freemoe, tmp_path):
    other = write_gguf(tiny_llama(tied=True), tmp_path / "other.gguf", "Q8_0")
    done = freemoe("merge", str(world.out), EXPERT, "-o", str(tmp_path / "merged"), "--base", str(other))
    done.refused("was made for the base", "base.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["other.gguf"]


def test_overwriting_replaces_model_folders_only(world, freemoe, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").write_text("x")
    arguments = ["merge", str(world.out), EXPERT, "--overwrite", "-o"]
    freemoe(*arguments, str(tmp_path / "there")).refused("is no model folder")
    save_base(tiny_model("gpt2"), tmp_path / "older")
    (tmp_path / "older" / "left.txt").write_text("x")
    # What no checkpoint has is somebody's own: it is named, and nothing is touched.
    freemoe(*arguments, str(tmp_path / "older")).refused("also holds 'left.txt'")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "older").config.model_type == "gpt2"
    (tmp_path / "older" / "left.txt").unlink()
    freemoe(*arguments, str(tmp_path / "older")).ok()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "older").config.model_type == "llama"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["older", "there"]


def test_a_gguf_that_fails_leaves_nothing(world, freemoe, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("freemoe.models.checkpoints.gguf_writing._quantize_tensor", full)
    done = freemoe("merge", str(world.out), EXPERT, "-o", str(tmp_path / "merged"), "--gguf", "f16")
    done.refused("could not be written", "The disk is full")
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_run_beside_it_is_kept(world, tmp_path):
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial" / "identity.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is an unfinished run"):
        FreeMoE.from_pretrained(None, world.out, device="cpu").merge_and_save(EXPERT, tmp_path / "m")
    assert (tmp_path / "m.partial" / "identity.json").exists()
