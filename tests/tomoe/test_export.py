"""Exported folders: they load by themselves, bit for bit, with freemoe and without, and say what is wrong with them."""

import json
import subprocess
import sys
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from freemoe.core.errors import ArtifactError, DataError, FamilyError, RecipeError
from freemoe.models.checkpoints.loading import load_base
from freemoe.tomoe import export as exporting
from freemoe.tomoe.export import CODE, build_converted_model, export_converted_model
from freemoe.tomoe.structures.masked import apply_structure
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tomoe.random_structures import random_structure

IDS = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder, the dense model and the structure that it came from."""
    model = tiny_model("qwen2")
    structure = random_structure(model)
    folder = tmp_path_factory.mktemp("export") / "my.model-v1"
    return export_converted_model(model, structure, folder, tokenizer=tiny_tokenizer()), model, structure


def edited(exported, into, change):
    """A copy of the folder whose config.json has been changed."""
    into.mkdir()
    for path in exported[0].iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    config = json.loads((into / "config.json").read_text())
    change(config)
    (into / "config.json").write_text(json.dumps(config))
    return into


@torch.no_grad()
@pytest.mark.parametrize("mode", ["shared", "materialised", "pseudo"])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("phi", False), ("gemma", True)])
def test_saved_and_loaded_is_bit_equal(family, tied, mode, tmp_path):
    model = tiny_model(family, tie_word_embeddings=tied)
    structure = random_structure(model)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        export_converted_model(model, structure, tmp_path / "m", mode), output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    new = build_converted_model(model, structure, mode)
    own, wanted = loaded.state_dict(), new.state_dict()
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[name], wanted[name]) and own[name].dtype == wanted[name].dtype for name in wanted)
    # Equal numbers, but products round by where in memory a matrix begins.
    torch.testing.assert_close(loaded(IDS).logits, new(IDS).logits, rtol=0, atol=1e-5)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


@torch.no_grad()
def test_written_in_shards_one_layer_at_a_time(tmp_path, monkeypatch):
    model = tiny_model("llama")
    structure = random_structure(model)
    made = []
    real = exporting._convert_layer

    def layer(*args):
        alive = [ref for refs in made for ref in refs if ref() is not None]
        assert not alive, "a layer is made beside another one"
        sizes, tensors = real(*args)
        made.append([weakref.ref(t) for t in tensors.values()])
        return sizes, tensors

    monkeypatch.setattr(exporting, "_convert_layer", layer)
    monkeypatch.setattr(exporting, "_SHARD", 1)
    folder = export_converted_model(model, structure, tmp_path / "m")
    # Once for their sizes, once for their values.
    assert len(made) == 2 * model.config.num_hidden_layers
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    monkeypatch.undo()
    own, wanted = load_base(folder, device="cpu")[0].state_dict(), build_converted_model(model, structure).state_dict()
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[name], wanted[name]) for name in wanted)


@torch.no_grad()
def test_bfloat16_keeps_routers_and_gates_in_float32(tmp_path):
    model = tiny_model("llama").to(torch.bfloat16)
    structure = random_structure(model)
    folder = export_converted_model(model, structure, tmp_path / "m")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    layer = loaded.model.layers[0]
    assert (layer.mlp.up.dtype, layer.mlp.router.weight.dtype) == (torch.bfloat16, torch.float32)
    assert layer.self_attn.value_gate.decode.dtype == torch.float32
    torch.testing.assert_close(layer.mlp.router.weight, structure[0].router_weight, rtol=0, atol=0)
    wanted = build_converted_model(model, structure).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


def test_the_folder_says_what_it_is(exported):
    folder, _model, structure = exported
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "tomoe_qwen2"
    assert config.tomoe["scale"] == pytest.approx(8**-0.5)
    for number, (layer, own) in enumerate(zip(config.tomoe["layers"], structure, strict=True)):
        assert layer["widths"] == own.neuron_counts
        assert layer["neurons"] == own.union_width
        # At most 15 patterns of 4 experts, next to each other: no expert's rows lie in more than 8 groups.
        experts = load_file(folder / "model.safetensors")[f"model.layers.{number}.mlp.experts"]
        assert max(int((rows[rows >= 0].diff() != 1).sum()) for rows in experts) < 8
        assert layer["value_keep"] == own.value_width
        assert layer["query_width"] == 2 * int(own.qk.sum())
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"]
    assert not (folder / "partial").exists()


@torch.no_grad()
def test_load_base_knows_the_folder_in_a_fresh_process(exported):
    code = f"""
import torch
from freemoe.models.checkpoints.loading import load_base
model, tokenizer = load_base({str(exported[0])!r}, device="cpu")
assert tokenizer is not None
print(type(model).__module__, float(model(torch.full((1, 3), 7)).logits.double().sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    module, total = done.stdout.split()
    assert module == "freemoe.tomoe.modeling"
    model = load_base(exported[0], device="cpu")[0]
    # With gradients and without, the experts are computed in different ways.
    assert float(total) == pytest.approx(float(model(torch.full((1, 3), 7)).logits.double().sum()), abs=1e-3)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("numba", [True, False], ids=["numba", "no numba"])
def test_the_folder_loads_and_generates_without_freemoe(exported, numba, tmp_path):
    folder, model, structure = exported
    code = f"""
import sys, torch
for name in {["freemoe", *([] if numba else ["numba"])]!r}:
    sys.modules[name] = None  # importing it fails
from transformers import AutoModelForCausalLM, AutoTokenizer
assert AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=False)("a")["input_ids"]
assert not any(n.startswith("transformers_modules") for n in sys.modules)
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules"), type(model)
ids = torch.tensor({IDS[:1].tolist()!r})
out = model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True)
rows = next(m for n, m in sys.modules.items() if n.startswith("transformers_modules") and n.endswith(".rows"))
print("LOOPS", rows.rows_available(torch.float32), "SEEN", *out[0].tolist())
model.save_pretrained({str(tmp_path / "again")!r})
"""
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    environment["NUMBA_OPT"] = "0"  # compiling takes most of the time
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with apply_structure(model, structure):
        want = model.generate(IDS[:1], max_new_tokens=5, do_sample=False, use_cache=True)
    # The folder alone is as fast: its compiled loops lie in it.
    assert f"LOOPS {numba} " in done.stdout
    assert done.stdout.split("SEEN")[1].split() == [str(n) for n in want[0].tolist()]
    assert "custom code" not in done.stdout, "the tokenizer asks whether the model's code may run"
    assert (tmp_path / "again" / CODE).exists()


def test_a_half_written_folder_is_no_model(exported, tmp_path):
    cut = edited(exported, tmp_path / "cut", lambda config: None)
    weights = load_file(cut / "model.safetensors")
    del weights["model.layers.1.mlp.down"]
    save_file(weights, cut / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match=r"layers\.1\.mlp\.down.*Export the model again"):
        AutoModelForCausalLM.from_pretrained(cut)
    with pytest.raises(DataError, match="damaged"):
        load_base(cut, device="cpu")


def test_a_killed_export_leaves_no_config(monkeypatch, tmp_path):
    model = tiny_model("llama")
    with monkeypatch.context() as patch:
        patch.setattr("freemoe.tomoe.export.remote_code", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export_converted_model(model, random_structure(model), tmp_path / "m")
    assert not (tmp_path / "m" / "config.json").exists()
    export_converted_model(model, random_structure(model), tmp_path / "m")
    assert not (tmp_path / "m" / "partial").exists()
    with pytest.raises(ArtifactError, match="holds a model already"):
        export_converted_model(model, random_structure(model), tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config["tomoe"].update(format=99), r"format 99; this code reads 1"),
        (lambda config: config["tomoe"]["layers"].pop(), r"1 layers; allowed are .* 2 layers"),
        (lambda config: config["tomoe"].update(mode="dense"), "mode 'dense'"),
    ],
    ids=["another version", "fewer layers", "another mode"],
)
def test_a_config_of_something_else_is_refused(exported, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(edited(exported, tmp_path / "copy", change))


def test_what_does_not_fit_is_refused(tmp_path):
    model, normed = tiny_model("llama"), tiny_model("phi", qk_layernorm=True)
    whole = random_structure(model)
    for base, structure, mode, error, says in (
        (model, whole[:1], "shared", DataError, "1 layers, the model 2"),
        (tiny_model("llama", intermediate_size=40), whole, "shared", DataError, "experts has shape"),
        (model, whole, "dense", RecipeError, "'dense'; allowed: shared, materialised, pseudo"),
        (tiny_model("phi3"), whole, "shared", FamilyError, "cannot be converted"),
        (normed, random_structure(normed), "shared", FamilyError, "qk_layernorm=false"),
    ):
        with pytest.raises(error, match=says):
            export_converted_model(base, structure, tmp_path / "m", mode=mode)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_the_dense_model_is_left_as_it_was():
    model = tiny_model("phi")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = build_converted_model(model, random_structure(model))
    assert new.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    new.model.layers[0].mlp.down.zero_()
    new.model.layers[0].self_attn.o_proj.bias.zero_()
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
