"""Shared prefixes and branches against rows that are run whole: the same answers on every family, with fewer tokens."""

import logging
import random

import pytest
import torch

from freemoe.evals.engine import scorer as scorer_module
from freemoe.evals.engine.scorer import Scorer, TokenPair
from freemoe.evals.engine.sharing import masks_are_dense, sharing_problem, sliding_window
from tests.tiny import CASES, tiny_model, tiny_tokenizer

# Layers that see 16 tokens only, where the family has such layers.
WINDOWS = {"mistral": 16, "mixtral": 16, "phi3": 16, "gemma2": 16, "gemma3": 16, "gpt_oss": 16}


def text(rng, length):
    return "".join(rng.choice("abc XYZ?1") for _ in range(length))


def documents(prefix=60, count=6, seed=5):
    """Two subjects with a prefix each: letters, answers of several tokens, and a few texts that share nothing."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(2):
        shared = text(rng, prefix)
        for i in range(count):
            context = shared + text(rng, rng.randrange(3, 20)) + "?"
            pairs += [(context, f" {letter}") for letter in "ABC"]
            if i % 2:
                pairs += [(context, " " + text(rng, rng.randrange(3, 9)) + ".") for _ in range(3)]
    pairs += [("", "alone"), ("", "another text, whole"), ("q" * 300, " A"), ("q" * 300, " BCD"), pairs[0]]
    return pairs


def counted(model):
    """The shape of every input, and how many positions the head saw, forward by forward."""
    inputs, heads = [], []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: heads.append(out.shape[:2].numel()))
    return inputs, heads


def both(model, **options):
    return (Scorer(model, tiny_tokenizer(), share_prefixes=share, **options) for share in (False, True))


def assert_same(found, expected):
    for (value, greedy, *_), (other, other_greedy, *_) in zip(found, expected, strict=True):
        assert value == pytest.approx(other, rel=1e-5, abs=1e-5)
        assert greedy == other_greedy


@pytest.mark.parametrize("family", CASES)
def test_every_family_gives_the_same_answers(family):
    model = tiny_model(family)
    whole, shared = both(model, batch_tokens=700)
    pairs = documents()
    prompts = [context for context, _ in pairs[:18:3] if context]
    # Answers that are greedy, so that not all are False.
    pairs += [(p, t) for p, t in zip(prompts, whole.generate(prompts, (), 3), strict=True) if t.strip()]
    inputs, _ = counted(model)
    expected, alone = whole.loglikelihoods(pairs), len(inputs)
    assert_same(shared.loglikelihoods(pairs), expected)
    assert shared.fallback is None
    tokens = [rows * length for rows, length in inputs]
    assert sum(tokens[alone:]) < sum(tokens[:alone]) / 2
    assert shared.truncated == whole.truncated == {"": 2}
    for until in ((), ("b", "1")):
        assert shared.generate(prompts, until, 8) == whole.generate(prompts, until, 8)


@pytest.mark.parametrize("family", WINDOWS)
def test_a_prefix_longer_than_the_window(family):
    model = tiny_model(family, sliding_window=WINDOWS[family])
    assert sliding_window(model) == 16
    whole, shared = both(model, batch_tokens=900)
    pairs = documents(prefix=40, count=3)
    inputs, _ = counted(model)
    assert_same(shared.loglikelihoods(pairs), whole.loglikelihoods(pairs))
    assert shared.fallback is None
    assert any(rows == 1 and length >= 40 for rows, length in inputs)  # a prefix
    prompts = [context for context, _ in pairs[:9:3]]
    inputs.clear()
    texts = shared.generate(prompts, (), 6)
    # Padding between prefix and prompts would push the prefix out of the window.
    assert inputs[0][0] == 3
    assert texts == whole.generate(prompts, (), 6)


def test_a_prefix_or_a_context_is_run_once_a_call_and_the_head_on_answers_only():
    model = tiny_model("llama")
    scorer = Scorer(model, tiny_tokenizer(), batch_tokens=400)
    shared = "s" + text(random.Random(0), 79)
    prefixed = [scorer.encode_pair(f"{shared}{letter}what?", f" {c}") for letter in "abcdefgh" for c in "ABCD"]
    branches = [scorer.encode_pair("What is the answer?", answer) for answer in (" one.", " two.", " none.")]
    for pairs in (prefixed, branches):
        scorer.score(pairs)
    inputs, heads = counted(model)
    scorer.score(prefixed)
    # Answers are a space and a letter: the space is run, and both of them are predicted.
    assert inputs == [(1, 80), (4, 7), (4, 7)]
    # Calls without rows only find out what stands behind the head.
    assert [rows for rows in heads if rows] == [8, 8]
    inputs.clear(), heads.clear()
    scorer.score(branches)
    assert inputs == [(1, 19 + 4 + 4 + 5)]
    assert [rows for rows in heads if rows] == [1 + 4 + 4 + 5]


def test_weights_may_change_between_calls():
    model = tiny_model("llama")
    whole, shared = both(model)
    pairs = [shared.encode_pair(*p) for p in documents()]
    before = shared.score(pairs)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
        model.model.layers[1].mlp.up_proj.weight[::2] = 0
    after = shared.score(pairs)
    assert all(abs(a.loglikelihood - b.loglikelihood) > 1e-3 for a, b in zip(after, before, strict=True))
    assert_same(after, whole.score(pairs))


def test_plans_are_kept_for_the_same_pairs_and_not_without_end(monkeypatch):
    made, plan = [], scorer_module.plan
    monkeypatch.setattr(scorer_module, "plan", lambda *a, **k: made.append(1) or plan(*a, **k))
    scorer = Scorer(tiny_model("llama"), tiny_tokenizer())
    pairs = [scorer.encode_pair(*p) for p in documents()]
    first = scorer.score(pairs)
    assert scorer.score(pairs) == first
    assert len(made) == 1
    assert scorer.score([TokenPair(*p) for p in pairs]) == first
    assert_same(scorer.score(pairs[::-1])[::-1], first)
    assert len(made) == 3
    monkeypatch.setattr(scorer_module, "_KEPT_TOKENS", 0)
    assert_same(scorer.score(pairs[:5]), first[:5])
    assert not scorer._plans


def test_half_precision_stays_close():
    model = tiny_model("llama").to(torch.bfloat16)
    whole, shared = both(model)
    found, expected = shared.loglikelihoods(documents()), whole.loglikelihoods(documents())
    assert shared.fallback is None
    assert max(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True)) < 0.3


# ------------------------------------------------------------------- falling back


def broken(kind):
    """A model whose forward does something else with a cache."""
    model = tiny_model("llama")
    forward = model.forward

    def other(*args, **kwargs):
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            if kind == "raises":
                raise TypeError("no such cache")
            kwargs.pop("past_key_values")
        return forward(*args, **kwargs)

    model.forward = other
    return model


@pytest.mark.parametrize(("kind", "why"), [("raises", "no such cache"), ("ignores", "answers differently")])
def test_a_model_that_cannot_share_is_run_whole_and_says_so(kind, why, caplog):
    pairs = documents()
    scorer = Scorer(broken(kind), tiny_tokenizer())
    with caplog.at_level(logging.WARNING):
        found = scorer.loglikelihoods(pairs)
        scorer.loglikelihoods(pairs[:7])
    assert why in scorer.fallback
    said = [r.getMessage() for r in caplog.records if r.name == scorer_module.log.name]
    assert [why in line for line in said] == [True]
    whole = Scorer(tiny_model("llama"), tiny_tokenizer(), share_prefixes=False)
    assert found == whole.loglikelihoods(pairs)


def test_branches_are_left_out_where_masks_are_not_dense(monkeypatch):
    model = tiny_model("llama")
    pairs = [("What is the answer?", answer) for answer in (" one.", " two.", " none.")]
    expected = Scorer(model, tiny_tokenizer()).loglikelihoods(pairs)
    assert masks_are_dense(model)
    model.config._attn_implementation = "flash_attention_2"
    assert not masks_are_dense(model)
    model.config._attn_implementation = "sdpa"
    monkeypatch.setattr(scorer_module, "masks_are_dense", lambda model: False)
    scorer = Scorer(model, tiny_tokenizer())
    inputs, _ = counted(model)
    assert_same(scorer.loglikelihoods(pairs), expected)
    assert inputs == [(3, 19 + 5)]


def test_what_a_trial_says():
    model = tiny_model("llama")
    assert sharing_problem(model, (5,), 256) is None
    assert sharing_problem(model, tuple(range(3, 90)), 256) is None
    assert "20 tokens is too short" in sharing_problem(model, (5, 6, 7), 20)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert sharing_problem(model, (5, 6, 7), 256) is None


# -------------------------------------------------------------------- generation


def test_prompts_share_their_prefix_and_finished_rows_leave():
    model = tiny_model("llama")
    rng = random.Random(2)
    shared = text(rng, 60)
    prompts = [shared + letter + text(rng, n) for letter, n in zip("abcdefgh", (3, 9, 3, 4, 5, 6, 2, 2), strict=True)]
    whole, scorer = both(model)
    free = whole.generate(prompts, (), 20)
    until = tuple(dict.fromkeys(t[4] for t in free[:6] if t[4:5].strip()))
    scorer.generate(prompts, until, 1)
    inputs, _ = counted(model)
    found = scorer.generate(prompts, until, 20)
    assert inputs[:2] == [(1, 60), (8, 10)]
    rows = [rows for rows, length in inputs[2:] if length == 1]
    assert len(rows) == len(inputs) - 2
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 8
    inputs.clear()
    assert found == whole.generate(prompts, until, 20)
    assert inputs[0] == (8, 70)
    assert len({len(t) for t in found}) > 1
