"""Tiny mixtures, a text, and blocks of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from freemoe.text.blocks import PackedBlocks, pack_blocks
from tests.tiny import CASES, tiny_model, tiny_tokenizer

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
assert set(MIXTURES) <= set(CASES)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Short documents with some order in them."""
    draw = random.Random(seed)
    words = ["the", "river", "runs", "over", "seven", "stones", "and", "a", "fox", "sleeps"]
    return [" ".join(draw.choice(words) for _ in range(12)) + f" {n}.\n" for n in range(count)]


def blocks_of(count: int = 6, length: int = 24, seed: int = 0) -> PackedBlocks:
    """Rows of tokens of the byte tokenizer, documents apart."""
    return pack_blocks(tiny_tokenizer(), sentences(40, seed), length).select_rows(range(count))


def logits(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Of some ids, as the model stands."""
    ids = torch.arange(3, 27)[None] if ids is None else ids
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.fixture(params=MIXTURES)
def mixture(request: pytest.FixtureRequest) -> Any:
    """A tiny random model of every family with a router."""
    return tiny_model(request.param, num_hidden_layers=3)


@pytest.fixture
def mixtral() -> Any:
    """Mixtral, 3 layers of 4 experts, 2 per token."""
    return tiny_model("mixtral", num_hidden_layers=3)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Mixtral, its tokenizer and a text."""
    folder = tmp_path_factory.mktemp("mixture")
    tiny_model("mixtral", num_hidden_layers=3).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    tiny_model("llama").save_pretrained(folder / "dense")
    tiny_tokenizer().save_pretrained(folder / "dense")
    import json

    lines = [json.dumps({"text": s}) for s in sentences(150, 1)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
