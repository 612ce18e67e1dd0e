"""Mixtures that are trained for the benchmark: their shapes, what they never see, what is kept, what hooks win back there."""

import json
import math
import random
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.harness import Settings
from benchmarks.hookmoe import mixtures, quality
from freemoe.core.errors import DataError, RecipeError
from freemoe.hookmoe.plans.layers import plan_of
from tests.rows import write_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two of the files, small."""
    root, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    words = ["river", "stone", "fox", "sleeps", "runs", "over", "seven", "the", "a", "and", "old", "grey"]
    texts = [{"text": f"{' '.join(draw.choices(words, k=50))} {n}."} for n in range(500)]
    write_rows(root / "c4" / "c4_demo.jsonl", texts)
    items = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}."} for n in range(200)]
    write_rows(root / "gsm8k" / "train.jsonl", items)
    return root


@pytest.mark.parametrize("shape", mixtures.SHAPES)
def test_experts_dominate_a_mixture_of_25_million_parameters(shape):
    tokenizer = MagicMock(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    tokenizer.__len__.return_value = mixtures.VOCABULARY
    with torch.device("meta"):
        model = mixtures.new_mixture(shape, tokenizer, 0)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    embeddings = model.get_input_embeddings().weight.numel()
    assert experts >= 25_000_000 > 90 * embeddings
    assert set(plan_of(model).ks) == {8}
    assert model.config.norm_topk_prob == (shape == "qwen3_moe")


def test_a_mixture_is_trained_once_and_never_sees_its_own_text(data, tmp_path):
    seen, unseen, names = mixtures.read_text(data)
    assert names == ["c4/c4_demo.jsonl", "gsm8k/train.jsonl"]
    assert not set(seen) & set(unseen)
    assert 0.08 < len(unseen) / (len(seen) + len(unseen)) < 0.2
    folder = mixtures.folder_of(tmp_path, "olmoe", steps=2, quick=True)
    assert mixtures.best_kept(tmp_path, "olmoe", quick=True) is None
    mixtures.make_mixture(folder, data, "olmoe", steps=2, quick=True)
    lines = (folder / "unseen.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == unseen
    weights = folder / "model" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    mixtures.make_mixture(folder, data, "olmoe", steps=2, quick=True)
    assert weights.stat().st_mtime_ns == written
    longer = mixtures.folder_of(tmp_path, "olmoe", steps=3, quick=True)
    more = mixtures.make_mixture(longer, data, "olmoe", steps=3, quick=True)
    assert mixtures.best_kept(tmp_path, "olmoe", quick=True) == more
    # Other steps in the same folder are another mixture.
    mixtures.make_mixture(folder, data, "olmoe", steps=1, quick=True)
    assert weights.stat().st_mtime_ns != written
    assert (mixtures.kept(folder) or {})["steps"] == 1
    assert mixtures.best_kept(tmp_path, "olmoe") is None


def test_a_mixture_that_cannot_be_made_is_refused(data, tmp_path):
    with pytest.raises(DataError, match=r"None of wikitext.*is below"):
        mixtures.make_mixture(tmp_path / "m", tmp_path, "olmoe")
    with pytest.raises(RecipeError, match="'dbrx'; allowed: olmoe, qwen3_moe"):
        mixtures.make_mixture(tmp_path / "m", data, "dbrx")


def test_what_hooks_win_back_is_shown_of_every_mixture_that_is_there(data, tmp_path):
    none, details = quality.on_mixture("olmoe", Settings(quick=True, cache=tmp_path))
    assert [f.name for f in none] == ["lost loss won back: several hooks, olmoe"]
    assert math.isnan(none[0].value)
    assert "--data-root" in none[0].note
    assert details == {}
    figures, details = quality.on_mixture("qwen3_moe", Settings(quick=True, cache=tmp_path, data_root=data))
    named = {f.name: f for f in figures}
    for what in ("lost loss", "KL", "lost accuracy"):
        assert named[f"{what} won back: several hooks, qwen3_moe"].target == quality.RECOVERED
        assert named[f"{what} won back, lower end: one hook, qwen3_moe"].target == quality.LEAST
    assert details["plan"] == "2,2"
    assert details["mixture"]["files"] == ["c4/c4_demo.jsonl", "gsm8k/train.jsonl"]
    full, plan = details["free"]["full"], details["free"]["plan"]
    assert full["kl"] == pytest.approx(0.0, abs=1e-6)
    assert plan["kl"] > 0
    # Without documents the accuracy is that of the next token.
    assert full["accuracy"] == pytest.approx(full["next_token_accuracy"])
