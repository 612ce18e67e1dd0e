"""Batches of any padding and any mix of experts give what their sequences give one by one, without padding."""

import copy
import threading

import pytest
import torch
from transformers import TextIteratorStreamer

from freemoe.core.errors import DataError
from freemoe.domain_experts.hosting.batches import left_padded, merge_generated
from freemoe.domain_experts.mixture import FreeMoE
from tests.domain_experts.test_mixed_batches import mixture
from tests.domain_experts.test_mixture import PROMPTS, ids_of
from tests.tiny import tiny_model

NAMES = ["law/0", "base", "sums/all", "law/0"]
GREEDY = {"max_new_tokens": 5, "do_sample": False}


def rows(names):
    """Every prompt alone, and its expert."""
    names = names if isinstance(names, list) else [names] * len(PROMPTS)
    return [(ids_of(text)[0], name) for text, name in zip(PROMPTS, names, strict=True)]


@pytest.mark.parametrize("names", [NAMES, "law/1", "base", "auto"], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_any_padding_equals_one_by_one(moe, side, names):
    ids, mask = ids_of(*PROMPTS, side=side)
    logits = moe(ids, attention_mask=mask, expert=names).logits
    out = moe.generate(ids, attention_mask=mask, expert=names, **GREEDY)
    for i, (row, name) in enumerate(rows(names)):
        torch.testing.assert_close(logits[i][mask[i].bool()], moe(row, expert=name).logits[0], rtol=1e-4, atol=1e-5)
        alone = moe.generate(row, expert=name, **GREEDY)[0, row.shape[1] :]
        assert torch.equal(out[i, ids.shape[1] : ids.shape[1] + len(alone)], alone)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_are_counted_from_the_first_token(side):
    """By a model whose embeddings know positions; of several experts test_mixed_batches.py shows it."""
    moe = mixture("gpt2")
    ids, mask = ids_of(*PROMPTS, side=side)
    logits = moe(ids, attention_mask=mask, expert="d/0").logits
    for i, (row, name) in enumerate(rows("d/0")):
        torch.testing.assert_close(logits[i][mask[i].bool()], moe(row, expert=name).logits[0], rtol=1e-4, atol=1e-5)
    # What is given is kept, as everywhere in transformers.
    given = torch.zeros_like(ids)
    kept = moe(ids, attention_mask=mask, position_ids=given, expert="base").logits
    assert torch.equal(kept, moe.model(ids, attention_mask=mask, position_ids=given).logits)


def test_padding_at_the_right_is_known_without_a_mask(moe):
    ids, mask = ids_of(*PROMPTS, side="right")
    moe.generation_config.pad_token_id = 0
    found = moe.generate(ids, expert="law/0", **GREEDY)
    assert torch.equal(found, moe.generate(ids, attention_mask=mask, expert="law/0", **GREEDY))
    assert not torch.equal(found[1], moe.model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[1])


def test_padding_moves_with_everything_that_belongs_to_a_token():
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7], [8, 0, 0], [0, 9, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 0]])
    found = left_padded(model, {"input_ids": ids, "attention_mask": mask, "position_ids": ids + 1, "top_k": 3})
    assert found["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8], [0, 0, 9]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert found["position_ids"].tolist() == [[6, 7, 8], [1, 1, 9], [1, 1, 10]]
    assert found["top_k"] == 3
    embeds = torch.arange(18.0).view(3, 3, 2)
    moved = left_padded(model, {"inputs_embeds": embeds, "attention_mask": mask})["inputs_embeds"]
    assert torch.equal(moved[1, 2], embeds[1, 0])
    untouched = {"input_ids": ids, "attention_mask": torch.zeros_like(mask)}
    assert torch.equal(left_padded(model, untouched)["input_ids"], ids)


def test_embeddings_instead_of_ids(moe):
    ids, mask = ids_of(*PROMPTS, side="right")
    embeds = moe.get_input_embeddings()(ids)
    for names in ("law/0", NAMES):
        both = moe(ids, attention_mask=mask, expert=names), moe(inputs_embeds=embeds, attention_mask=mask, expert=names)
        torch.testing.assert_close(both[0].logits, both[1].logits)
        out = moe.generate(inputs_embeds=embeds, attention_mask=mask, expert=names, **GREEDY)
        wanted = moe.generate(ids, attention_mask=mask, expert=names, **GREEDY)[:, ids.shape[1] :]
        assert torch.equal(out[:, : wanted.shape[1]], wanted)


def test_the_loss_of_one_expert(moe):
    ids, mask = ids_of(*PROMPTS, side="right")
    labels = ids.masked_fill(mask == 0, -100)
    with moe.expert("law/1"):
        wanted = moe.model(input_ids=ids, attention_mask=mask, labels=labels).loss
    assert torch.equal(moe(ids, attention_mask=mask, labels=labels, expert="law/1").loss, wanted)
    assert torch.equal(moe(ids, attention_mask=mask, labels=labels, expert=["law/1"] * 4).loss, wanted)
    assert not torch.equal(moe(ids, attention_mask=mask, labels=labels).loss, wanted)


def test_an_unknown_expert_stops_a_batch_before_it_runs(moe, monkeypatch):
    ids, mask = ids_of(*PROMPTS)
    monkeypatch.setattr(moe.model, "forward", lambda **inputs: pytest.fail("it ran"))
    with pytest.raises(KeyError, match="Unknown expert 'law/7'"):
        moe(ids, attention_mask=mask, expert=["law/0", "base", "law/1", "law/7"])


def test_several_sequences_per_prompt(moe):
    ids, mask = ids_of(*PROMPTS)
    found = moe.generate(ids, attention_mask=mask, expert=NAMES, num_beams=3, num_return_sequences=2, **GREEDY)
    for i, (row, name) in enumerate(rows(NAMES)):
        alone = moe.generate(row, expert=name, num_beams=3, num_return_sequences=2, **GREEDY)[:, row.shape[1] :]
        assert torch.equal(found[2 * i : 2 * i + 2, ids.shape[1] :][:, : alone.shape[1]], alone)


def test_groups_that_end_early_are_padded_or_refused():
    parts = [([1], torch.tensor([[4, 5]])), ([0, 2], torch.tensor([[6, 7, 8], [9, 9, 9]]))]
    assert merge_generated(parts, 3).tolist() == [[6, 7, 8], [4, 5, 3], [9, 9, 9]]
    with pytest.raises(DataError, match="Pass pad_token_id"):
        merge_generated(parts, None)
    level = [([1], torch.tensor([[4, 5, 1]])), parts[1]]
    assert merge_generated(level, None).tolist() == [[6, 7, 8], [4, 5, 1], [9, 9, 9]]


@pytest.mark.parametrize("place", ["keywords", "generation_config", "the base's own"])
def test_rows_that_end_early_are_filled_up_with_the_padding_that_is_asked_for(moe, place):
    ids, mask = ids_of(*PROMPTS)
    end = int(moe(ids, attention_mask=mask, expert=NAMES).logits[1, -1].argmax())
    asked = {"pad_token_id": 77, "eos_token_id": end}
    alone = [moe.generate(row, expert=name, **asked, **GREEDY)[0, row.shape[1] :] for row, name in rows(NAMES)]
    config = copy.deepcopy(moe.generation_config)
    config.update(**asked)
    if place == "the base's own":
        moe.model.generation_config, given = config, {}
    else:
        given = asked if place == "keywords" else {"generation_config": config}
    found = moe.generate(ids, attention_mask=mask, expert=NAMES, **given, **GREEDY)[:, ids.shape[1] :]
    assert len(alone[1]) == 1 < found.shape[1]
    for row, own in zip(found, alone, strict=True):
        assert row.tolist() == own.tolist() + [77] * (len(row) - len(own))


def test_texts_in_a_list(moe):
    alone = [moe.generate_text(text, **GREEDY) for text in PROMPTS]
    assert moe.generate_text(PROMPTS, **GREEDY) == alone
    assert len({expert for _, expert in alone}) > 1
    named = moe.generate_text(PROMPTS, expert=NAMES, **GREEDY)
    assert named == [moe.generate_text(t, expert=e, **GREEDY) for t, e in zip(PROMPTS, NAMES, strict=True)]
    assert moe.generate_text([], **GREEDY) == []
    assert moe.generate_text(PROMPTS[:1], expert="law/0", **GREEDY) == named[:1]
    with pytest.raises(DataError, match=r"Prompt 1 \(counted from 0\) has 0 tokens"):
        moe.generate_text(["a", ""], expert="base")
    moe.tokenizer.pad_token = None
    assert moe.generate_text(PROMPTS, **GREEDY) == alone


def test_texts_can_be_routed(moe):
    ids, mask = ids_of(*PROMPTS, side="right")
    wanted = moe.route(ids, mask)
    assert moe.route(PROMPTS) == wanted == moe.route(*ids_of(*PROMPTS))
    assert moe.route(PROMPTS[2]) == wanted[2:3]
    assert moe.route([]) == []
    with pytest.raises(DataError, match="tokenizer"):
        FreeMoE(moe.model, [], moe.router).route("x")


def test_nothing_to_go_by_leads_to_the_base(moe):
    object.__setattr__(moe.router, "threshold", 0.0)
    for prompts in ("", torch.tensor([[1, 2]]), torch.zeros(1, 0).long()):
        ((name, route),) = moe.route(prompts)
        assert (name, route.confidence) == ("base", 0)
    assert moe.route(["", PROMPTS[0]])[1] == moe.route(PROMPTS[0])[0]
    assert moe.route(PROMPTS[0])[0][0] != "base"


@pytest.mark.parametrize("expert", ["law/1", "auto"])
def test_text_can_be_streamed(moe, expert):
    streamer = TextIteratorStreamer(moe.tokenizer, skip_prompt=True, skip_special_tokens=True)
    options = {"expert": expert, "streamer": streamer, **GREEDY}
    thread = threading.Thread(target=moe.generate, args=ids_of(PROMPTS[0])[:1], kwargs=options)
    thread.start()
    said = "".join(streamer)
    thread.join()
    assert said == moe.generate_text(PROMPTS[0], expert=expert, **GREEDY)[0] != ""
