"""Logits of many sequences in one pass are those of each alone, for every family, wherever they stand in the cache."""

import random

import pytest
import torch

from freemoe import FreeMoE
from freemoe.serve.engine import acting
from freemoe.serve.engine.acting import ByExpert, InOnePass
from freemoe.serve.engine.cache import token_bytes
from freemoe.serve.engine.runner import BatchRow, ModelRunner, SlotRunner, plain_cache, runner_for
from freemoe.serve.settings import EngineLimits
from tests.domain_experts.test_threads import experts_on
from tests.tiny import CASES, tiny_model

# Layers that forget what is further back than 64 tokens; within 64 they are like all others.
WINDOWED = {"gemma2", "gemma3", "gemma3_images", "gpt_oss"}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Nobody:
    """A host that is always the base."""

    def __init__(self, model=None):
        self.model, self.names = model, []

    def expert(self, name):
        self.names.append(name)
        return torch.no_grad()

    def set_expert(self, name):
        self.names.append(name)


def logits(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0]


def slots(model, acting, context=48, batch=4, sequences=0):
    """A runner with so many sequences, 0, 1 ..."""
    runner = SlotRunner(model, acting, EngineLimits(context, batch=batch))
    for number in range(sequences):
        runner.add_sequence(number)
    return runner


def mixing(monkeypatch, family="llama", worth=True):
    """A model, with experts that share a pass or take turns."""
    model = tiny_model(family)
    monkeypatch.setattr(acting, "worth_mixing", lambda weights, rows: worth)
    return model, FreeMoE(model, experts_on(model))


def same(found, model, ids):
    torch.testing.assert_close(found[0], logits(model, ids)[-1], atol=1e-4, rtol=1e-3)


def rounds(model, runner, seed, context=48):
    """Random sequences that come, read in parts, write and go; every pass against the sequence alone."""
    rng = random.Random(seed)
    held = {}
    number = 0
    for _ in range(12):
        while len(held) < 4 and rng.random() < 0.7:
            runner.add_sequence(number)
            held[number] = []
            number += 1
        rows = []
        for n in rng.sample(list(held), rng.randint(0, len(held))):
            new = [rng.randrange(3, 250) for _ in range(rng.choice([1, 1, 1, 7]))]
            held[n] += new
            rows.append(BatchRow(n, tuple(new), "base", rng.choice(["last", "every"])))
        if rows:
            for row, found in zip(rows, runner.forward(rows), strict=True):
                true = logits(model, held[row.number])
                true = true[-len(row.tokens) :] if row.wanted == "every" else true[-1:]
                torch.testing.assert_close(found, true, atol=2e-4, rtol=2e-3)
        for n in [n for n in held if len(held[n]) > context - 8 or rng.random() < 0.2]:
            runner.remove_sequence(n)
            del held[n]


@pytest.mark.parametrize("family", CASES)
def test_which_families_are_run_as_batches(family):
    model = tiny_model(family)
    batched = isinstance(runner_for(Nobody(model), EngineLimits(256, batch=4)), SlotRunner)
    assert batched == (family not in WINDOWED)
    if family in WINDOWED:
        assert isinstance(runner_for(Nobody(model), EngineLimits(64, batch=4)), SlotRunner)


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "opt", "phi", "gemma2", "mixtral", "deepseek_v2", "gpt_oss", "gpt_neox"]
)
def test_passes_say_what_each_sequence_alone_says(family):
    model = tiny_model(family)
    rounds(model, slots(model, ByExpert(Nobody())), 1)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_own_caches_say_the_same_beyond_a_window(family):
    model = tiny_model(family)
    runner = ModelRunner(model, ByExpert(Nobody()))
    ids = [(7 * i) % 240 + 5 for i in range(90)]
    runner.add_sequence(5)
    runner.forward([BatchRow(5, tuple(ids[:40]), "base", "none")])
    [found] = runner.forward([BatchRow(5, tuple(ids[40:]), "base")])
    torch.testing.assert_close(found[0], logits(model, ids)[-1], atol=2e-4, rtol=2e-3)
    assert plain_cache(model, 256) == (family == "llama")


def test_experts_take_turns_and_the_one_that_is_there_goes_first():
    host = Nobody()
    runner = slots(tiny_model("llama"), ByExpert(host), sequences=4)
    for _ in range(2):
        runner.forward([BatchRow(n, (5,), name) for n, name in enumerate("abab")])
    assert host.names == ["a", "b", "a"]


def test_padding_beyond_the_context_is_no_trouble():
    # A row near its end shares a pass with a long one: learned positions end at the context.
    model = tiny_model("gpt2", n_positions=32)
    runner = slots(model, ByExpert(Nobody()), 32, 2, sequences=2)
    ids = [(7 * i) % 240 + 5 for i in range(32)]
    runner.forward([BatchRow(0, tuple(ids[:31]), "base")])
    last, other = runner.forward([BatchRow(0, (ids[31],), "base"), BatchRow(1, tuple(ids[:20]), "base")])
    same(last, model, ids)
    same(other, model, ids[:20])


def test_nan_of_one_sequence_never_reaches_another():
    model = tiny_model("llama")
    model.get_input_embeddings().weight[200] = torch.nan
    runner = slots(model, ByExpert(Nobody()), batch=3, sequences=3)
    found = runner.forward([BatchRow(n, ids, "base") for n, ids in enumerate(((5, 6), (200, 7), (8, 9, 10)))])
    assert [bool(one.isnan().any()) for one in found] == [False, True, False]
    # The slot of the one that failed is taken again, by the one that moves there and by a new one.
    runner.remove_sequence(1)
    runner.add_sequence(3)
    again = runner.forward([BatchRow(0, (11,), "base"), BatchRow(2, (12,), "base"), BatchRow(3, (13, 14), "base")])
    for one, ids in zip(again, ([5, 6, 11], [8, 9, 10, 12], [13, 14]), strict=True):
        same(one, model, ids)


@pytest.mark.parametrize("family", CASES)
def test_bytes_per_token_are_those_of_the_cache(family):
    model = tiny_model(family)
    runner = slots(model, ByExpert(Nobody()), 16, 1, sequences=1)
    runner.forward([BatchRow(0, (5,), "base")])
    assert runner.cache.num_bytes == token_bytes(model.config, 4) * 16


@pytest.mark.parametrize("worth", [True, False])
def test_rows_of_several_experts_share_a_pass_where_that_is_quicker(monkeypatch, worth):
    model, moe = mixing(monkeypatch, worth=worth)
    runner = slots(model, InOnePass(moe), sequences=4)
    passes, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: passes.append(len(inputs["input_ids"])) or forward(**inputs))
    names = ["a", "base", "c+d", "a"]
    held = {n: [5 + n, 9, 11][: 1 + n % 3] for n in range(4)}
    found = runner.forward([BatchRow(n, tuple(ids), names[n]) for n, ids in held.items()])
    for n, token in enumerate((20, 30, 40, 50)):
        held[n].append(token)
    again = runner.forward([BatchRow(n, (ids[-1],), names[n]) for n, ids in held.items()])
    runner.forward([BatchRow(2, (60,), "b")])
    runner.release_model()
    assert sorted(passes) == ([1, 4, 4] if worth else [1] * 5 + [2] * 2)
    for n, ids in held.items():
        with moe.expert(names[n]):
            same(found[n], model, ids[:-1])
            same(again[n], model, ids)
    assert moe.active == "base"


def test_one_expert_alone_is_switched_in_after_a_while(monkeypatch):
    model, moe = mixing(monkeypatch)
    runner = slots(model, InOnePass(moe), batch=2, sequences=2)
    active, ids = [], [5]
    runner.forward([BatchRow(0, (5,), "a"), BatchRow(1, (6,), "b")])
    for token in range(7, 30):
        [found] = runner.forward([BatchRow(0, (token,), "a")])
        ids.append(token)
        active.append(moe.active)
    runner.release_model()
    assert active == ["base"] * 15 + ["a"] * 8
    with moe.expert("a"):
        same(found, model, ids)


def test_experts_that_cannot_be_mixed_take_turns(monkeypatch):
    model, moe = mixing(monkeypatch, "mixtral")
    runner = slots(model, InOnePass(moe), sequences=2)
    found = runner.forward([BatchRow(0, (5, 6), "a"), BatchRow(1, (7, 8), "b")])
    runner.release_model()
    for one, (ids, name) in zip(found, (([5, 6], "a"), ([7, 8], "b")), strict=True):
        with moe.expert(name):
            same(one, model, ids)
