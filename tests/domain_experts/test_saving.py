"""Experts that were put together by hand are an artefact like any, and what was opened is copied while it is what it was."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from freemoe.core.artifacts import MANIFEST
from freemoe.core.errors import ArtifactError
from freemoe.domain_experts.expert import DomainExpert, switch_expert, unit_expert
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.structured.units import find_units
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.weights import find_weights
from tests.tiny import tiny_model

PROMPTS = ("appeal treaty?", "12+7=", "the statute of the party")


def logits(moe, expert):
    with torch.no_grad(), moe.expert(expert):
        return moe.model(input_ids=torch.arange(3, 40)[None]).logits


def random_expert(model, name, seed):
    generator = torch.Generator().manual_seed(seed)
    masks = {w.name: TensorMask.of_bools(torch.rand(w.size, generator=generator) < 0.1) for w in find_weights(model)}
    return switch_expert(name, Mask(masks))


def by_hand(world):
    units = find_units(world.model, "neuron")
    experts = [
        random_expert(world.model, "law/mine", 0),
        unit_expert("law/units", "neuron", units.line_indices({0: torch.arange(4), 1: torch.arange(2, 6)}), Mask()),
        DomainExpert("law/none"),
    ]
    return FreeMoE(world.model, experts, tokenizer=world.tokenizer)


def test_experts_made_by_hand_come_back_bit_for_bit(world, tmp_path):
    moe = by_hand(world)
    moe.set_expert("law/mine")
    saved = moe.save_pretrained(tmp_path / "mine", base=str(world.base))
    assert moe.active == "law/mine"
    moe.set_expert("base")
    back = FreeMoE.from_pretrained(saved, device="cpu")
    assert back.experts == moe.experts
    for name in ("base", *moe.experts):
        assert torch.equal(logits(back, name), logits(moe, name))
    assert not torch.equal(logits(back, "law/mine"), logits(back, "base"))
    card = (saved / "README.md").read_text()
    assert "was not measured" in card
    assert "law/units" in card
    assert not (saved / "result.json").exists()
    again = back.save_pretrained(tmp_path / "again")
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {p.name: p.read_bytes() for p in saved.iterdir()}
    with pytest.raises(ArtifactError, match="fingerprint"):
        FreeMoE.from_pretrained(tiny_model("llama", seed=1), saved)


def test_what_was_loaded_from_several_artefacts_is_one_with_their_router(world, artefact, text_artefact, tmp_path):
    moe = FreeMoE.from_pretrained(artefact, device="cpu")
    gone = moe.experts[0]
    moe.load_expert(text_artefact)
    moe.load_expert(text_artefact, prefix="also-")
    moe.add_expert("both", union=["wiki/all", moe.experts[1]])
    moe.delete_expert(gone)
    assert moe.router is not None
    moe.router = replace(moe.router, threshold=0.0)
    back = FreeMoE.from_pretrained(moe.save_pretrained(tmp_path / "together"), device="cpu")
    assert back.experts == [*moe.experts, gone]
    for name in moe.experts:
        assert torch.equal(logits(back, name), logits(moe, name))
    assert torch.equal(logits(back, gone), logits(moe, "base"))
    here, there = ([name for name, _ in m.route(list(PROMPTS))] for m in (moe, back))
    assert [name if name != gone else "base" for name in there] == here
    manifest = json.loads((tmp_path / "together" / MANIFEST).read_text())
    assert manifest["base_model_name_or_path"] == str(world.base)


def test_an_expert_that_took_anothers_name_is_the_one_that_is_saved(world, text_artefact, tmp_path):
    other = FreeMoE(world.model, [random_expert(world.model, "wiki/all", 5)], tokenizer=world.tokenizer)
    more = other.save_pretrained(tmp_path / "other", base=str(world.base))
    moe = FreeMoE.from_pretrained(text_artefact, device="cpu")
    moe.delete_expert("wiki/all")
    moe.load_expert(more)
    with pytest.raises(ArtifactError, match=r"other experts \(wiki/all\) than the artefact"):
        moe.push_to_hub("owner/x")
    back = FreeMoE.from_pretrained(moe.save_pretrained(tmp_path / "new"), device="cpu")
    assert torch.equal(logits(back, "wiki/all"), logits(other, "wiki/all"))


def test_a_tokenizer_that_is_not_here_is_still_the_bases(artefact, world, tmp_path):
    moe = FreeMoE.from_pretrained(world.model, artefact)
    assert moe.tokenizer is None
    moe.delete_expert(moe.experts[0])
    back = FreeMoE.from_pretrained(moe.save_pretrained(tmp_path / "less"), device="cpu")
    assert back.tokenizer is not None
    assert torch.equal(logits(back, back.experts[0]), logits(moe, moe.experts[0]))


def test_a_new_name_for_the_base_is_written(text_artefact, world, tmp_path):
    shutil.copytree(world.base, tmp_path / "moved")
    moe = FreeMoE.from_pretrained(text_artefact, device="cpu")
    saved = moe.save_pretrained(tmp_path / "named", base=str(tmp_path / "moved"))
    back = FreeMoE.from_pretrained(saved, device="cpu")
    assert back.model.name_or_path == str(tmp_path / "moved")
    assert torch.equal(logits(back, "wiki/all"), logits(moe, "wiki/all"))


def test_what_could_not_be_read_again_is_not_written(world, tmp_path):
    base = str(world.base)
    for model, experts, given, message in (
        (world.model, [switch_expert("law/empty", Mask())], base, r"law/empty.*nothing that is off"),
        (tiny_model("llama"), [DomainExpert("law/none")], None, "does not say where it was loaded from"),
        (world.model, [], base, "no experts to save"),
    ):
        with pytest.raises(ArtifactError, match=message):
            FreeMoE(model, experts, tokenizer=world.tokenizer).save_pretrained(tmp_path / "x", base=given)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    for overwrite, fault in ((False, "exists already"), (True, "is not an artefact")):
        with pytest.raises(ArtifactError, match=fault):
            by_hand(world).save_pretrained(tmp_path / "full", base=base, overwrite=overwrite)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine.txt"]
    moe = by_hand(world)
    saved = moe.save_pretrained(tmp_path / "mine", base=base)
    moe.delete_expert("law/units")
    assert moe.save_pretrained(saved, base=base, overwrite=True) == saved
    assert FreeMoE.from_pretrained(saved, device="cpu").experts == ["law/mine", "law/none"]
