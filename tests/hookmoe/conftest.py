"""Tiny mixtures, a text, and blocks of it."""

import json
import random

import pytest
import torch

from freemoe.hookmoe.pipeline import trim
from freemoe.hookmoe.plans.layers import moe_layers
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.recipes import recipe_from
from freemoe.text.blocks import pack_blocks
from tests.tiny import CASES, save_base, tiny_model, tiny_tokenizer

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
QUICK = {"steps": 4, "rows": 2, "every": 2, "block": 32, "limit": 8, "held_out": 3, "test": 4}
"""The training of trims in tests."""
assert set(MIXTURES) <= set(CASES)


def sentences(count, seed=0):
    """Short documents with some order in them."""
    draw = random.Random(seed)
    words = ["the", "river", "runs", "over", "seven", "stones", "and", "a", "fox", "sleeps"]
    return [" ".join(draw.choice(words) for _ in range(12)) + f" {n}.\n" for n in range(count)]


def blocks_of(count=6, length=24, seed=0):
    """Rows of tokens of the byte tokenizer, documents apart."""
    return pack_blocks(tiny_tokenizer(), sentences(40, seed), length).select_rows(range(count))


def logits(model, ids=None):
    """Of some ids, as the model stands."""
    ids = torch.arange(3, 27)[None] if ids is None else ids
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.fixture(params=MIXTURES)
def mixture(request):
    """A tiny random model of every family with a router."""
    return tiny_model(request.param, num_hidden_layers=3)


@pytest.fixture
def mixtral():
    """Mixtral, 3 layers of 4 experts, 2 per token."""
    return tiny_model("mixtral", num_hidden_layers=3)


@pytest.fixture
def corrected():
    """DeepSeek-V3 whose gates choose by a correction that differs by layer and outweighs every sigmoid."""
    model = tiny_model("deepseek_v3", num_hidden_layers=3)
    for number, layer in enumerate(moe_layers(model)):
        bias = layer.gate.e_score_correction_bias
        # Larger than any difference of sigmoids here: the heaviest of the chosen is rarely the first choice.
        bias.copy_(torch.linspace(-0.5, 0.5, len(bias)).roll(number))
    return model


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A folder with a tiny Mixtral, its tokenizer and a text."""
    folder = tmp_path_factory.mktemp("mixture")
    save_base(tiny_model("mixtral", num_hidden_layers=3), folder / "model")
    save_base(tiny_model("llama"), folder / "dense")
    lines = [json.dumps({"text": s}) for s in sentences(150, 1)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def recipe(saved, output, training=None, **fields):
    """A trim of four steps to one expert per token; ``fields`` are those of the recipe."""
    data = {
        "command": "trim",
        "model": str(saved / "model"),
        "text": str(saved / "text.jsonl"),
        "output": str(output),
        "training": QUICK | (training or {}),
        "plan": {"given": "uniform:1"},
        "timing": {"rounds": 1, "new_tokens": 2},
        **fields,
    }
    found = recipe_from(data)
    assert isinstance(found, TrimRecipe)
    return found


@pytest.fixture(scope="session")
def done(saved, tmp_path_factory):
    """The folder of such a trim."""
    return trim(recipe(saved, tmp_path_factory.mktemp("done") / "out"))
