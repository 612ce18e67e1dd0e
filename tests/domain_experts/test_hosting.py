"""Experts come, go and are told of as PEFT's users expect; to other tools the whole is a transformers model."""

import copy

import pytest
import torch
from transformers import pipeline

from freemoe import FreeMoE
from freemoe.core.errors import ArtifactError, DataError, RecipeError, UnknownNameError
from freemoe.models.checkpoints.loading import dtype_name, load_base
from tests.artefacts import rewritten
from tests.domain_experts.conftest import read_result
from tests.domain_experts.test_mixture import EXPERTS, PROMPTS, bits, logits, unchanged
from tests.tiny import tiny_model


def test_a_second_artefact_on_one_base(moe, text_artefact):
    before = bits(moe.model)
    with moe.expert("law/0"):
        assert moe.load_expert(text_artefact) == ["wiki/all"]
        assert moe.active == "law/0"
    assert moe.experts == [*EXPERTS, "wiki/all"]
    alone = FreeMoE.from_pretrained(moe.model, text_artefact)
    assert torch.equal(logits(moe, expert="wiki/all"), logits(alone, expert="wiki/all"))
    assert moe.load_expert(text_artefact, "wiki/all", prefix="mine-") == ["mine-wiki/all"]
    assert torch.equal(logits(moe, expert="mine-wiki/all"), logits(alone, expert="wiki/all"))
    assert {name for name, _ in moe.route(PROMPTS)} <= {"base", *EXPERTS}
    assert unchanged(moe.model, before)


def test_a_mixture_is_opened_on_a_base_that_another_has_switched(moe, artefact):
    moe.set_expert("law/0")
    wanted = logits(moe)
    other = FreeMoE.from_pretrained(moe.model, artefact, tokenizer=moe.tokenizer, threads="raise")
    assert (moe.active, other.active, other.threads) == ("law/0", "base", "raise")
    assert torch.equal(logits(other, expert="law/0"), wanted)
    assert not torch.equal(logits(other), wanted)


def test_what_cannot_be_loaded_changes_nothing(moe, world, artefact, text_artefact, tmp_path):
    already = r"an expert 'law/0', 'law/1', 'sums/all' already.*prefix='NAME-'.*delete the one"
    with pytest.raises(DataError, match=already):
        moe.load_expert(artefact)
    with pytest.raises(UnknownNameError, match=r"'wiki/al'.*Did you mean 'wiki/all'"):
        moe.load_expert(text_artefact, "wiki/al")
    other = FreeMoE(tiny_model("llama", seed=1), [])
    with pytest.raises(ArtifactError, match="made for the base"):
        other.load_expert(artefact)
    assert other.experts == []
    copied = rewritten(artefact, tmp_path / "copy", manifest=lambda m: m.update(kind="hook"))
    with pytest.raises(ArtifactError, match="'hook', not domain experts"):
        moe.load_expert(copied)
    assert moe.experts == EXPERTS


def test_an_expert_that_is_deleted_leaves_the_base(moe):
    before = bits(moe.model)
    moe.set_expert("law/0")
    moe.delete_expert("law/0")
    assert (moe.active, moe.experts) == ("base", EXPERTS[1:])
    assert unchanged(moe.model, before)
    # The router still knows the way; it leads to the base now.
    assert all(name != "law/0" for name, _ in moe.route(PROMPTS))
    moe.set_expert("law/1+sums/all")
    moe.set_expert("sums/all")
    moe.set_expert("law/1")
    kept = logits(moe)
    moe.delete_expert("sums/all")
    assert (moe.active, moe._board.expert_names) == ("law/1", ["law/1"])
    assert torch.equal(logits(moe), kept)
    for gone in ("law/0", "base", "auto"):
        with pytest.raises(UnknownNameError):
            moe.delete_expert(gone)
    moe.set_expert(None)
    assert unchanged(moe.model, before)


def test_an_expert_can_be_disabled_for_a_while(moe):
    moe.set_expert("law/1")
    with moe.disable_expert() as same:
        assert same is moe
        assert moe.active_expert == moe.active == "base"
        base = logits(moe)
        with moe.disable_expert():
            assert torch.equal(logits(moe), base)
    assert moe.active_expert == "law/1"
    assert not torch.equal(logits(moe), base)


def test_the_summary_is_what_the_build_found(moe, artefact, capsys):
    subs = {s["name"]: s for d in read_result(artefact)["domains"] for s in d["subdomains"]}
    rows = moe.expert_summary()
    assert [row["name"] for row in rows] == EXPERTS
    for row in rows:
        sub = subs[row["name"]]
        assert row["off"] == sub["off"] == moe.expert_mask(row["name"]).count > 0
        assert row["share"] == pytest.approx(sub["off_share"])
        assert row["accepted"] is (sub["chosen"] != "base")
        assert row["verdict"] == sub["verdict"]
        assert row["gain"]["mean"] == sub["rows"]["expert"]["gain"]["mean"]
        assert row["bytes"] > 0
    with moe.expert("law/1"):
        moe.print_expert_summary()
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said] == ["expert", "law/0", "law/1 *", "sums/all"]
    assert f"{rows[0]['share']:.3%}" in said[1]
    assert rows[0]["gain"]["text"] in said[1]
    assert moe.active == "base"
    bare = FreeMoE(moe.model, list(moe._experts.values())).expert_summary()
    assert [(r["accepted"], r["gain"]) for r in bare] == [(None, None)] * 3
    assert [r["off"] for r in bare] == [r["off"] for r in rows]


@pytest.mark.parametrize("name", ["law/0", "law/1", "law/0+sums/all", None])
def test_a_merged_model_is_the_plain_model_with_zeros(moe, name):
    before = bits(moe.model)
    moe.set_expert("sums/all")
    wanted = logits(moe, expert=name)
    off = moe.expert_mask(name or "sums/all").count
    model = moe.merge_and_unload(name)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.equal(logits(model), wanted)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v.view(torch.int32), before[k])}
    assert 0 < sum(int((model.state_dict()[k] == 0).sum()) for k in changed) <= off
    # What is left has no experts, and cannot get some that were chosen on other values.
    assert (moe.experts, moe.active) == ([], "base")
    with pytest.raises(UnknownNameError):
        moe.set_expert("law/0")
    assert torch.equal(logits(moe), wanted)


def test_weights_that_are_not_in_memory_cannot_be_unloaded(artefact):
    moe = FreeMoE.from_pretrained(None, artefact, device="disk")
    with pytest.raises(ArtifactError, match=r"not in memory.*merge_and_save"):
        moe.merge_and_unload("law/1")


def test_what_tools_ask_is_answered(moe):
    """What of it is the base's own answer, test_protected_base.py shows."""
    assert moe.can_generate() is True
    with pytest.raises(AttributeError, match="nothing_like_that"):
        _ = moe.nothing_like_that
    assert not hasattr(FreeMoE.__new__(FreeMoE), "config")


def test_modes_are_the_bases():
    model = tiny_model("llama").train()
    assert FreeMoE(model, []).training
    moe = FreeMoE(model, []).eval()
    assert not any(m.training for m in moe.modules())
    assert all(m.training for m in moe.train().modules())


def test_a_pipeline(moe, caplog):
    pipe = pipeline("text-generation", model=moe, tokenizer=moe.tokenizer)
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    for expert in ("base", "law/1", "auto"):
        said = pipe(PROMPTS[0], expert=expert, **options)[0]["generated_text"]
        assert said == moe.generate_text(PROMPTS[0], expert=expert, max_new_tokens=5, do_sample=False)[0]
    with moe.expert("law/1"):
        assert pipe(PROMPTS[0], **options) == pipe(PROMPTS[0], expert="law/1", **options)
    batch = [said[0]["generated_text"] for said in pipe(PROMPTS, expert="auto", batch_size=4, **options)]
    assert batch == [text for text, _ in moe.generate_text(PROMPTS, max_new_tokens=5, do_sample=False)]
    assert "not supported" not in caplog.text


@pytest.mark.parametrize("active", ["base", "law/0", "law/0+law/1"])
def test_a_copy_is_a_model_of_its_own(moe, active):
    before = bits(moe.model)
    moe.set_expert(active)
    other = copy.deepcopy(moe)
    assert other.active == moe.active == active
    assert torch.equal(logits(other), logits(moe))
    assert other.expert_summary() == moe.expert_summary()
    with torch.no_grad():
        moe.model.lm_head.weight.zero_()
    moe.set_expert("sums/all")
    assert other.active == active
    other.set_expert(None)
    assert unchanged(other.model, before)
    assert not {p.data_ptr() for p in moe.parameters()} & {p.data_ptr() for p in other.parameters()}
    assert other.route(PROMPTS) == moe.route(PROMPTS)


def test_weights_go_out_and_come_in_as_the_bases(moe):
    assert list(moe.state_dict()) == [f"model.{k}" for k in moe.model.state_dict()]
    state = {k: v.clone() for k, v in moe.state_dict().items()}
    wanted = logits(moe, expert="law/0")
    other = FreeMoE(tiny_model("llama", seed=3), list(moe._experts.values()))
    other.set_expert("law/0")
    other.load_state_dict(state)
    assert other.active == "law/0"
    assert torch.equal(logits(other), wanted)
    other.set_expert(None)
    assert all(torch.equal(v, state[k]) for k, v in other.state_dict().items())


def test_a_conversion_that_keeps_the_values_is_made(moe):
    before = bits(moe.model)
    moe.set_expert("law/0")
    wanted = logits(moe)
    assert moe.double() is moe
    assert (moe.dtype, moe.active) == (torch.float64, "law/0")
    torch.testing.assert_close(logits(moe), wanted.double(), rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(moe.to(torch.float32)), wanted)
    assert torch.equal(logits(moe.to("cpu")), wanted)
    moe.set_expert(None)
    assert unchanged(moe.model, before)


@pytest.mark.parametrize(
    "convert", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.float16)]
)
def test_a_conversion_that_rounds_is_refused(moe, convert):
    moe.set_expert("law/0")
    wanted = logits(moe)
    with pytest.raises(DataError, match=r"values would be rounded.*--dtype b?float16.*merge_and_unload\(NAME\)"):
        convert(moe)
    assert (moe.dtype, moe.active) == (torch.float32, "law/0")
    assert torch.equal(logits(moe), wanted)
    assert moe.merge_and_unload().to(torch.bfloat16).dtype == torch.bfloat16


def test_number_formats_are_objects_or_names(world, artefact):
    given = (None, "auto", torch.float32, "bfloat16", "torch.bfloat16")
    assert [dtype_name(d) for d in given] == ["auto", "auto", "float32", "bfloat16", "bfloat16"]
    with pytest.raises(RecipeError, match="dtype is 'int8'; allowed: auto, float32"):
        load_base(world.base, None, torch.int8)
    for name in ("dtype", "torch_dtype"):
        moe = FreeMoE.from_pretrained(None, artefact, **{name: torch.float32}, device="cpu")
        assert moe.dtype == torch.float32
        with pytest.raises(ArtifactError, match="fingerprint"):
            FreeMoE.from_pretrained(None, artefact, **{name: torch.bfloat16}, device="cpu")
