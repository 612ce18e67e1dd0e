"""A base is what its files say, or it is refused: no gap is filled with random numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from freemoe.core.errors import DataError
from freemoe.models.checkpoints.loading import load_base
from tests.tiny import tiny_model

UP = "model.layers.1.mlp.up_proj.weight"
LOG = "freemoe.models.checkpoints.load_report"


def edited(folder: Path, edit: Callable[[dict[str, Tensor]], Any] | None = None, **config: Any) -> Path:
    """Change the tensors of a checkpoint, and values of its config."""
    if edit is not None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma3", "mixtral", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_checkpoint_is_loaded_without_a_word(
    case: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(case, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    loaded, _ = load_base(tmp_path / "model", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert not [r for r in caplog.records if r.name == LOG]


def test_a_missing_tensor(llama: Path) -> None:
    edited(llama, lambda t: t.pop(UP))
    with pytest.raises(
        DataError, match=r"is not whole: it lacks 1 tensor \(model\.layers\.1\.mlp\.up_proj\.weight\)\."
    ):
        load_base(llama, device="cpu")


def test_a_missing_head_that_is_not_tied(llama: Path) -> None:
    edited(llama, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(DataError, match=r"lacks 1 tensor \(lm_head\.weight\)"):
        load_base(llama, device="cpu")


def test_fewer_layers_than_the_config_says(llama: Path) -> None:
    edited(llama, num_hidden_layers=4)
    with pytest.raises(
        DataError, match=r"lacks 18 tensors \(model\.layers\.2\.input_layernorm\.weight, .*, \.\.\.\)\."
    ):
        load_base(llama, device="cpu")


def test_another_model_type(llama: Path) -> None:
    edited(llama, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(DataError, match=r"lacks \d+ tensors \(.* also hold 2\d tensors \(.*Check model_type") as caught:
        load_base(llama, device="cpu")
    assert len(str(caught.value)) < 900


def test_wrong_shapes(llama: Path) -> None:
    edited(llama, lambda t: t.update({UP: torch.zeros(40, 32)}))
    with pytest.raises(
        DataError, match=r"other shapes than 1 tensor \(.*up_proj\.weight \(40x32 in the file, 48x32 by"
    ):
        load_base(llama, device="cpu")
    edited(llama, lambda t: t.update({UP: torch.zeros(48, 32)}), intermediate_size=64)
    with pytest.raises(DataError, match=r"other shapes than 6 tensors"):
        load_base(llama, device="cpu")


@pytest.mark.parametrize("edit", [lambda t, k: t.pop(k), lambda t, k: t.update({k: torch.zeros(3, 5)})])
def test_an_expert_of_a_mixture_is_missing_or_misshapen(edit: Any, tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path / "m")
    edited(tmp_path / "m", lambda t: edit(t, "model.layers.0.block_sparse_moe.experts.1.w1.weight"))
    with pytest.raises(DataError, match="could not be loaded"):
        load_base(tmp_path / "m", device="cpu")


def test_a_truncated_file(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match="could not be loaded"):
        load_base(llama, device="cpu")


def test_what_nothing_asks_for_is_named(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = load_base(llama, device="cpu")[0]
    edited(llama, lambda t: t.update({"model.extra.weight": torch.zeros(3)}))
    with caplog.at_level(logging.WARNING, LOG):
        loaded, _ = load_base(llama, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), loaded.parameters(), strict=True))
    assert "holds 1 tensor (model.extra.weight) that its model has no place for" in caplog.text
    caplog.clear()
    edited(llama, num_hidden_layers=1)
    load_base(llama, device="cpu")
    assert "holds 10 tensors (model.extra.weight, model.layers.1." in caplog.text
