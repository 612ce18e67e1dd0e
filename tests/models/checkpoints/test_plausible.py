"""A folder that no model can be read from is refused before the model is built: in words, and in seconds."""

import io
import json
import os
import pickle
import shutil
import struct
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from freemoe.assets import demo_model_path
from freemoe.core.errors import DataError, RecipeError
from freemoe.models.checkpoints.base_files import find_base_files
from freemoe.models.checkpoints.checks.plausible import require_fillable
from freemoe.models.checkpoints.loading import load_base, load_config, load_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(demo_model_path(), folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


def says(name, **values):
    """A JSON file with values set."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def holds(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def instead(name, data):
    """Another weight file in place of the one that is there."""
    return lambda folder: (folder / WEIGHTS).rename(folder / name).write_bytes(data)


def cut(bytes_left, behind=b""):
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:bytes_left] + behind)


def header(length, data):
    return holds(WEIGHTS, struct.pack("<Q", length) + data)


def made(name, make):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def pickled():
    stream = io.BytesIO()
    torch.save({"model.norm.weight": torch.ones(3)}, stream)
    return stream.getvalue()


REFUSED = {
    # Before the model is built.
    "a billion layers": (says("config.json", num_hidden_layers=10**9), r"num_hidden_layers 1,000,000,000.*38 tensors"),
    "layers of thirty digits": (says("config.json", num_hidden_layers=10**30), r"num_hidden_layers 1e\+30"),
    "no layers": (says("config.json", num_hidden_layers=0), "num_hidden_layers 0, and without layers"),
    "fewer than no layers": (says("config.json", num_hidden_layers=-1), "num_hidden_layers -1"),
    **{
        f"{name} {value!r:.20}": (says("generation_config.json", **{name: value}), f"(?s)is not whole: {name}")
        for name, value in {"num_beams": 0, "num_return_sequences": 10**9, "temperature": "hot", "top_p": 1e30}.items()
    },
    "a huge vocabulary": (says("config.json", vocab_size=2**31), "vocab_size 2,147,483,648"),
    "a number in a config in it": (says("config.json", text_config={"hidden_size": 2**70}), "hidden_size 1.18e"),
    "large defaults": (says("config.json", model_type="deepseek_v3"), "weights, and its files hold|not be loaded"),
    "a config that is a list": (holds("config.json", b"[]"), r"config.json holds a JSON list"),
    "a config with a key twice": (holds("config.json", b'{"model_type": "llama", "model_type": "gpt2"}'), "twice"),
    "a config that is a pipe": (made("config.json", os.mkfifo), "a pipe or a device"),
    "a config that leads to itself": (made("config.json", lambda p: p.symlink_to(p)), "no config.json|cannot be read"),
    "weights that are a device": (made(WEIGHTS, lambda p: p.symlink_to("/dev/zero")), "a pipe or a device"),
    "a tokenizer that is a pipe": (made("tokenizer.json", os.mkfifo), "a pipe or a device"),
    "a template that is a pipe": (made("chat_template.jinja", os.mkfifo), "a pipe or a device"),
    "empty weights": (cut(0), "0 bytes and announces a header of 0"),
    "weights cut in their header": (cut(100), "announces a header"),
    "weights cut by a byte": (cut(-1), "cut short"),
    "weights with more behind": (cut(None, b"x"), "longer than its header"),
    "a header without end": (header(2**63, b"{}"), "announces a header of 9,223"),
    "a header that is deep": (header(10**5, b"[" * 10**5), "deep"),
    "a header of other things": (header(7, b'{"a":5}'), "cannot be read"),
    "an index that is a list": (instead(INDEX, b"[]"), "no weight_map"),
    "an index of numbers": (instead(INDEX, b'{"weight_map": {"a": 5}}'), "no weight_map"),
    "an index that leads out": (instead(INDEX, b'{"weight_map": {"a": "../../x.safetensors"}}'), "outside of the f"),
    "an index of a file that is not there": (instead(INDEX, b'{"weight_map": {"a": "b.safetensors"}}'), "is not there"),
    # By what transformers says, whatever it raises.
    "no heads": (says("config.json", num_attention_heads=0), "could not be loaded: ZeroDivisionError"),
    "a type that is a list": (says("config.json", model_type=[]), "could not be loaded"),
    "an unknown type": (says("config.json", model_type="x\x1b[31m"), "could not be loaded"),
    "a quantisation that is a number": (says("config.json", quantization_config=5), "could not be loaded"),
    "settings that are a list": (holds("generation_config.json", b"[]"), "generation_config.json holds a JSON list"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "could not be loaded"),
    "empty pickled weights": (instead("pytorch_model.bin", b""), "could not be loaded"),
    "pickled weights that were cut": (instead("pytorch_model.bin", pickled()[:100]), "could not be loaded"),
    "pickled weights that are a program": (instead("pytorch_model.bin", pickle.dumps(Evil())), "could not be loaded"),
    "pickled weights of other shapes": (instead("pytorch_model.bin", pickled()), "not whole|could not be loaded"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words_and_soon(case, model, monkeypatch):
    change, reason = REFUSED[case]
    monkeypatch.chdir(model.parent)
    change(model)
    began = time.monotonic()
    with pytest.raises(DataError, match=rf"(?s){reason}") as caught:
        load_base(str(model))
    assert time.monotonic() - began < 30
    assert len(str(caught.value)) < 1500
    assert not (model.parent / "executed").exists()


TOKENIZERS = {
    "a list": holds("tokenizer.json", b"[]"),
    "nothing": holds("tokenizer.json", b"null"),
    "empty": holds("tokenizer.json", b""),
    "without a model": says("tokenizer.json", model=None),
    "a version of words": says("tokenizer.json", version="x"),
    "a class that is a number": says("tokenizer_config.json", tokenizer_class=5),
    "a token that is a number": says("tokenizer_config.json", eos_token=5),
    "settings that are a list": holds("tokenizer_config.json", b"[]"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_odd_tokenizers(case, model):
    TOKENIZERS[case](model)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(model))
    assert len(str(caught.value)) < 1500


def test_the_config_alone_is_looked_at_too(model):
    says("config.json", num_hidden_layers=10**9)(model)
    with pytest.raises(DataError, match="1,000,000,000"):
        load_config(str(model))


def test_what_is_well_passes(model):
    require_fillable("m", model, find_base_files(model).headers)
    tensors = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    places = {name: "b.safetensors" if number < 10 else "a.safetensors" for number, name in enumerate(tensors)}
    for shard in ("a.safetensors", "b.safetensors"):
        held = {name: tensor for name, tensor in tensors.items() if places[name] == shard}
        save_file(held, model / shard, metadata={"format": "pt"})
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    require_fillable("m", model, find_base_files(model).headers)
    base, _ = load_base(str(model))
    assert sum(p.numel() for p in base.parameters()) == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", "xpu", "meta", "cpu:7"])
def test_a_device_that_is_not_there(device, model, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    # Said before anything is read.
    (model / WEIGHTS).unlink()
    with pytest.raises(RecipeError, match=f"Device '{device}' is not on this machine; torch finds cpu here"):
        load_base(str(model), device=device)
