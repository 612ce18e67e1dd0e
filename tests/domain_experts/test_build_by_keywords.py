"""A build by keywords, on a loaded model and rows in memory: the same artefact as by recipe and files."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from freemoe import FreeMoE, build, load_recipe
from tests.domain_experts.conftest import read_result, task_recipe
from tests.domain_experts.test_mixture import bits, unchanged


def keywords(world, output):
    """What `task_recipe` says, by keywords and from memory."""
    told = task_recipe(world, output)
    return {
        "domains": {
            "law": Dataset.from_list([json.loads(line) for line in world.law.read_text().splitlines()]),
            "sums": world.sums,
        },
        "output": output,
        "count": {"law": 2, "sums": 1},
        "min_size": 4,
        "bands": told.bands,
        "saliency": told.saliency,
        "metric": ["saliency", "wanda", "random"],
        "search": {"method": "exhaustive", "select": "argmax"},
        "controls": 1,
    }


def test_a_loaded_model_gives_the_same_artefact_and_stays_what_it_is(world, artefact, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(world.base).train()
    next(model.parameters()).requires_grad_(False)
    before, asked = bits(model), [p.requires_grad for p in model.parameters()]
    hooks = [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()]
    folder = build(model=model, tokenizer=world.tokenizer, **keywords(world, tmp_path / "out"))
    assert unchanged(model, before)
    assert [p.requires_grad for p in model.parameters()] == asked
    assert all(p.grad is None for p in model.parameters())
    assert all(m.training for m in model.modules())
    assert [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()] == hooks
    for name in ("experts.safetensors", "router.safetensors"):
        assert (folder / name).read_bytes() == (artefact / name).read_bytes()
    # But for the places of their files, which notes name.
    ours, theirs = ([{**d, "notes": ()} for d in read_result(f)["domains"]] for f in (folder, artefact))
    assert ours == theirs
    assert read_result(folder)["cost"]["units_reused"] == 0
    moe = FreeMoE.from_pretrained(model, folder, tokenizer=world.tokenizer)
    assert moe.experts == FreeMoE.from_pretrained(world.model, artefact).experts
    # The recipe alone repeats it: the rows stand in a file, and the model has a name.
    recipe = load_recipe(folder / "recipe.yaml")
    assert recipe.model == str(world.base)
    again = build(recipe.model_copy(update={"output": str(tmp_path / "again")}))
    assert (again / "experts.safetensors").read_bytes() == (folder / "experts.safetensors").read_bytes()


def test_a_build_from_memory_goes_on_where_it_stopped(world, tmp_path, monkeypatch):
    from freemoe.domain_experts import pipeline as module

    def stopped(*arguments):
        raise KeyboardInterrupt

    model = AutoModelForCausalLM.from_pretrained(world.base)
    with monkeypatch.context() as patch:
        patch.setattr(module, "choose_all", stopped)
        with pytest.raises(KeyboardInterrupt):
            build(model=model, tokenizer=world.tokenizer, **keywords(world, tmp_path / "out"))
    folder = build(model=model, tokenizer=world.tokenizer, **keywords(world, tmp_path / "out"))
    assert read_result(folder)["cost"]["units_reused"] > 0
    assert torch.equal(next(model.parameters()), next(world.model.parameters()))
