"""A GGUF file as a base: the numbers it holds, a plain model afterwards, and an error for each way it can be wrong."""

import importlib.util
import json
import logging
import struct

import gguf
import numpy as np
import pytest
import torch

from freemoe.core.errors import DataError
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.gguf_header import gguf_origin, read_header
from freemoe.models.checkpoints.loading import load_base, load_tokenizer
from freemoe.models.checkpoints.saving import save_checkpoint
from freemoe.models.weights import find_weights
from tests.gguf_files import tiny_llama, write_gguf

TEXT = "the one on the thin 12 lines, né?"


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_in_f32_is_the_model_it_was_written_from(tied, tmp_path):
    model = tiny_llama(tied)
    loaded, tokenizer = load_base(write_gguf(model, tmp_path / "tiny.gguf"), device="cpu")
    wanted = model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(v, wanted[k]) for k, v in loaded.state_dict().items())
    assert fingerprint_model(loaded) == fingerprint_model(model)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == TEXT
    assert len(ids[0]) < len(TEXT.encode())  # the merges are used
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    assert loaded.config.tie_word_embeddings == tied


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_a_quantised_one_holds_what_dequantising_gives(kind, tmp_path, caplog):
    model = tiny_llama()
    path = write_gguf(model, tmp_path / f"{kind}.gguf", kind)
    with caplog.at_level(logging.INFO, "freemoe.models"):
        loaded, _ = load_base(path, device="cpu")
    assert f"dequantised from GGUF {kind} to float32" in caplog.text
    assert gguf_origin(path) == f"dequantised from GGUF {kind} to float32"
    assert loaded.dtype == torch.float32
    name = "model.layers.1.mlp.down_proj.weight"
    stored, number = model.state_dict()[name].numpy(), gguf.GGMLQuantizationType[kind]
    wanted = gguf.dequantize(gguf.quantize(stored, number), number)
    assert np.array_equal(loaded.state_dict()[name].numpy(), wanted)
    assert not np.array_equal(stored, wanted)
    # Another load, another file of the same tensors: the same base.
    again = write_gguf(model, tmp_path / "again.gguf", kind)
    assert fingerprint_model(load_base(again, device="cpu")[0]) == fingerprint_model(loaded) != fingerprint_model(model)


def test_it_is_a_plain_model_afterwards(tmp_path):
    loaded, tokenizer = load_base(write_gguf(tiny_llama(), tmp_path / "tiny.gguf", "Q8_0"), device="cpu")
    assert len(find_weights(loaded)) == 14
    save_checkpoint(loaded, tmp_path / "ours")
    loaded.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "ours")
    for name in ("ours", "theirs"):
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())
        again, _ = load_base(tmp_path / name, device="cpu")
        assert fingerprint_model(again) == fingerprint_model(loaded)
    assert load_tokenizer(tmp_path / "ours")(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    loaded.train()
    assert all(p.requires_grad for p in loaded.parameters())


def test_the_tokenizer_comes_without_the_weights(tmp_path, monkeypatch):
    path = write_gguf(tiny_llama(), tmp_path / "tiny.gguf", "Q8_0")
    dequantize = gguf.dequantize

    def probed(data, kind):
        assert data.size < 1000, "the weights were read"
        return dequantize(data, kind)

    monkeypatch.setattr(gguf, "dequantize", probed)
    with pytest.raises(DataError, match="the weights were read"):
        load_base(path)
    assert load_tokenizer(path)("the")["input_ids"]


def test_it_is_found_in_the_folder_where_one_stands(tmp_path, monkeypatch):
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    monkeypatch.chdir(tmp_path)
    assert load_base("tiny.gguf", device="cpu")[1]
    with pytest.raises(DataError, match=r"has no config\.json.*It holds a GGUF file: give its path, .*tiny\.gguf"):
        load_base(tmp_path)


def test_the_header_is_what_the_package_reads(tmp_path):
    path = write_gguf(tiny_llama(), tmp_path / "tiny.gguf", "Q4_1")
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert header.types == {t.name: t.tensor_type.name for t in reader.tensors}
    assert header.shapes == {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    scalars = {k: f.contents() for k, f in reader.fields.items() if len(f.types) == 1 and not k.startswith("GGUF.")}
    assert header.values == scalars


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r"There is no file .*m\.gguf"),
        (b"PK\3\4" + bytes(100), r"is not a GGUF file: it begins with b'PK"),
        (b"", r"is not a GGUF file: it begins with b''"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is GGUF version 1; versions that can be read: 2 and 3"),
    ],
    ids=["nothing", "a zip", "empty", "version 1"],
)
def test_what_is_not_there_or_not_a_gguf(data, message, tmp_path):
    if data is not None:
        (tmp_path / "m.gguf").write_bytes(data)
    for load in (load_base, load_tokenizer):
        with pytest.raises(DataError, match=message):
            load(tmp_path / "m.gguf")


def test_truncated_anywhere(tmp_path):
    path = write_gguf(tiny_llama(), tmp_path / "tiny.gguf", "Q8_0")
    whole = path.read_bytes()
    for size in (8, 20, 30, 200, 3000, 6000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"tiny\.gguf' is truncated: .*Copy or download it again"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("tiny", {"drop": "blk.1.ffn_up.weight"}, r"lacks 1 tensor \(model\.layers\.1\.mlp\.up_proj\.weight\)"),
        ("tiny", {"layers": 3}, "lacks 9 tensors"),
        ("tiny", {"architecture": "plamo"}, r"plamo is not supported.*a GGUF of architecture 'plamo'"),
        ("tiny-00001-of-00003", {"split__count": 3}, r"is one of 3 parts of a model\. Join them first"),
        ("tiny", {"llama__rope__scale_linear": 4}, r"scales its rotary embedding \(linear, by 4\)"),
        ("tiny", {"add": {"blk.0.attn_q.bias": (32,)}}, "96 numbers of norms and biases in layer 0, and .* has 64"),
        (
            "tiny",
            {"add": {"blk.1.attn_q_norm.weight": (8,)}},
            "72 numbers of norms and biases in layer 1, and .* has 64",
        ),
        ("tiny", {"add": {"blk.2.ffn_up.weight": (64, 32)}}, "layer 2, and the model has 2 layers"),
    ],
)
def test_files_that_make_no_model(name, how, message, tmp_path):
    model, how = tiny_llama(), dict(how)
    model.config.num_hidden_layers = how.pop("layers", 2)
    path = write_gguf(model, tmp_path / f"{name}.gguf", **how)
    for load in (load_base, load_tokenizer) if "architecture" in how else (load_base,):
        with pytest.raises(DataError, match=message):
            load(path)


@pytest.mark.parametrize("number", [99, 9])
def test_a_type_that_cannot_be_read(number, tmp_path):
    path = write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    # Name, rank, two sizes, type: the number behind them says how the tensor is stored.
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    assert struct.unpack_from("<I", data, at) == (0,)
    struct.pack_into("<I", data, at, number)
    path.write_bytes(data)
    said = {99: "type 99", 9: "Q8_1"}[number]
    with pytest.raises(DataError, match=rf"in {said} \(blk\.0\.attn_q\.weight\).*can be: F32, F16, Q4_0, Q4_1, .*Q8_0"):
        load_base(path)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_the_package(package, tmp_path, monkeypatch):
    path = write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == package else find(name, *a))
    said = rf"needs the package {package}, which is missing.*pip install 'freemoe\[gguf\]'"
    with pytest.raises(DataError, match=said):
        load_base(path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "F32"), (1e6, "F16")])
def test_a_number_that_is_none_or_that_its_type_cannot_hold(tmp_path, value, kind):
    model = tiny_llama()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = value
    path = write_gguf(model, tmp_path / "tiny.gguf", kind)
    with pytest.raises(DataError, match=r"NaN or infinity in '.*up_proj"):
        load_base(path, device="cpu")
