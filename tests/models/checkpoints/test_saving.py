"""Checkpoints written a few layers at a time: the same files as transformers writes, with less in memory."""

import gc
import json
import os
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, modeling_utils

from freemoe.core.errors import ArtifactError, DataError, FamilyError
from freemoe.models.checkpoints.saving import require_free, save_checkpoint
from tests.memory import bytes_beside
from tests.rows import write_rows
from tests.tiny import CASES, tiny_model


def tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        new = load_file(path)
        assert not new.keys() & found.keys()
        found |= new
    return found


def data_bytes(path):
    return sum(t.nbytes for t in load_file(path).values())


def others(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name.startswith(("config", "generation"))}


@pytest.mark.parametrize(
    ("case", "size"), [*((case, "50KB") for case in CASES), ("llama", "1GB"), ("mixtral", "1GB"), ("mixtral", 1000)]
)
def test_it_is_what_transformers_writes(case, size, tmp_path):
    model = tiny_model(case)
    model.save_pretrained(tmp_path / "theirs")
    save_checkpoint(model, tmp_path / "ours", size)
    theirs, ours = tensors(tmp_path / "theirs"), tensors(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[k], ours[k]) and theirs[k].dtype == ours[k].dtype for k in theirs)
    assert others(tmp_path / "theirs") == others(tmp_path / "ours")
    index = tmp_path / "ours" / "model.safetensors.index.json"
    names = sorted(p.name for p in (tmp_path / "ours").iterdir())
    if size == "1GB":
        assert names == sorted(p.name for p in (tmp_path / "theirs").iterdir())
        return
    model.save_pretrained(tmp_path / "sharded", max_shard_size=size)
    expected = json.loads((tmp_path / "sharded" / index.name).read_text())
    found = json.loads(index.read_text())
    assert found["metadata"] == expected["metadata"]
    assert found["weight_map"].keys() == ours.keys()
    shards = sorted(dict.fromkeys(found["weight_map"].values()))
    assert shards == [n for n in names if n.endswith(".safetensors")]
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for key, shard in found["weight_map"].items():
        assert key in load_file(tmp_path / "ours" / shard)
    # Experts that share memory stay in one shard, so theirs may be larger than asked for as well.
    limit = max([50_000 if size == "50KB" else size, *map(data_bytes, (tmp_path / "sharded").glob("*.safetensors"))])
    assert all(data_bytes(tmp_path / "ours" / shard) <= limit for shard in shards)


@pytest.mark.parametrize("case", ["mixtral", "llama"])
def test_no_more_than_a_shard_or_a_layer_is_held_beside_the_model(case, tmp_path, monkeypatch):
    model = tiny_model(case, num_hidden_layers=8)
    whole = sum(p.nbytes for p in model.parameters())
    layer = sum(p.nbytes for p in model.model.layers[1].parameters())
    size = int(2.2 * layer)
    gc.collect()
    before = bytes_beside(model)
    held = []
    write = modeling_utils.safe_save_file

    def watched(*args, **kwargs):
        held.append(bytes_beside(model) - before)
        return write(*args, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_save_file", watched)
    save_checkpoint(model, tmp_path / "ours", size)
    assert len(held) >= 4
    assert max(held) <= size < whole / 3
    # Only what has other names on disk is copied at all.
    assert (max(held) > layer / 2) == (case != "llama")
    # The yardstick sees a copy of the model.
    monkeypatch.undo()
    before = bytes_beside(model)
    kept = [p.detach().clone() for p in model.parameters()]
    assert bytes_beside(model) - before >= sum(k.nbytes for k in kept) >= whole


def test_a_saved_checkpoint_is_saved_again_the_same(tmp_path):
    model = tiny_model("mixtral", tie_word_embeddings=True).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    save_checkpoint(model, tmp_path / "one", "30KB")
    theirs, again = (AutoModelForCausalLM.from_pretrained(tmp_path / n).eval() for n in ("theirs", "one"))
    assert again.dtype == torch.bfloat16
    assert again.lm_head.weight is again.model.embed_tokens.weight
    ids = torch.tensor([[5, 9, 200]])
    assert torch.equal(again(ids).logits, theirs(ids).logits)
    save_checkpoint(again, tmp_path / "two", "30KB")
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(DataError, match=r"max_shard_size is '5 pages'.*'5GB'"):
        save_checkpoint(tiny_model("llama"), tmp_path / "a", "5 pages")
    with pytest.raises(FamilyError):
        save_checkpoint(torch.nn.Linear(2, 2), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("config.json", "holds no weights"),
        ("model.safetensors", "is no model folder"),
        ("config.json model.safetensors thesis.tex", "also holds 'thesis.tex'"),
        ("config.json model.safetensors src/main.c", "also holds 'src'"),
        ("config.json model.safetensors notes.txt", "also holds 'notes.txt'"),
        ("config.json model.safetensors answers.json", "also holds 'answers.json'"),
        ("config.json model.safetensors freemoe_config.json", "is an artefact of freemoe"),
        ("config.json model.safetensors tokenizer.json README.md", None),
    ],
)
def test_only_a_plain_checkpoint_is_replaced(tmp_path, held, why):
    for name in held.split():
        write_rows(tmp_path / "out" / name, [{}])
    with pytest.raises(ArtifactError, match="exists already"):
        require_free(tmp_path / "out", overwrite=False)
    with pytest.raises(ArtifactError, match=why) if why else nullcontext():
        require_free(tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_whom_the_umask_lets_read_the_configuration_may_read_the_weights(umask, tmp_path):
    before = os.umask(umask)
    try:
        save_checkpoint(tiny_model("llama"), tmp_path, "50KB")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert len(modes) > 3
    assert set(modes.values()) == {0o666 & ~umask}, modes
