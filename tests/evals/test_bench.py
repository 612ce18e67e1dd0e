"""What `freemoe bench` times: every side in turns, switching that leaves the base, one batch of several experts."""

import pytest
import torch

from benchmarks.serve.material import random_experts
from freemoe.core.errors import DataError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.evals import speed
from freemoe.evals.bench import BenchSizes, benchmark_artifact
from freemoe.evals.engine.answering import Answering
from freemoe.evals.speed import in_turns
from tests.tiny import tiny_model

SIZES = BenchSizes(prompt=6, new=4, batch=3, rounds=2)


@pytest.fixture
def moe():
    model = tiny_model("llama")
    return FreeMoE(model, random_experts(model, ["a", "b", "c"], 0))


def test_every_side_is_timed_after_a_round_that_warms_up():
    asked = []
    found = in_turns({name: lambda name=name: asked.append(name) or len(asked) for name in "xy"}, 2)
    assert asked == ["y", "x", "x", "y", "y", "x"]
    assert found == {"x": [3, 6], "y": [4, 5]}


def test_experts_beside_the_base_and_in_one_batch(moe, monkeypatch):
    asked = []
    generate = moe.generate

    def noted(*args, expert=None, **how):
        asked.append(expert)
        return generate(*args, expert=expert, **how)

    monkeypatch.setattr(moe, "generate", noted)
    before = {name: p.clone() for name, p in moe.model.named_parameters()}
    found = benchmark_artifact(moe, SIZES, most=2)
    assert list(found["requests"]) == ["base", "a", "b"]
    assert found["requests"]["base"]["first_token"]["times_as_fast"]["mean"] == 1.0
    assert found["switch"]["experts"] == ["a", "b"]
    assert asked.count("base") == asked.count(["a", "b", "a"]) == SIZES.rounds + 1
    seconds = SIZES.batch * SIZES.new / found["batch"]["tokens_per_second"]["mixed"]
    assert 0 < seconds < 60
    assert found["memory"]["weights_bytes"] == sum(p.numel() * p.element_size() for p in moe.model.parameters())
    # The base is there again, bit for bit.
    assert moe.active == "base"
    assert all(torch.equal(p, before[name]) for name, p in moe.model.named_parameters())


def test_ways_of_a_model_without_experts_and_another_to_hold_it_against():
    model, other = tiny_model("llama"), tiny_model("llama")
    found = benchmark_artifact(Answering(model, None), SIZES, against=Answering(other, None))
    assert list(found["requests"]) == ["against", "base"]
    assert not {"switch", "batch"} & set(found)


def test_a_ratio_is_of_the_same_round(monkeypatch):
    model, times = tiny_model("llama"), iter([9.0, 9.0, 1.0, 2.0, 8.0, 4.0])
    monkeypatch.setattr(speed, "time_request", lambda *_: (next(times), 1.0))
    found = benchmark_artifact(Answering(model, None), SIZES, against=Answering(model, None))
    # Rounds of 1 and 4 seconds against 2 and 8: half as fast in each, so that the interval has no width.
    ratio = found["requests"]["base"]["first_token"]["times_as_fast"]
    assert (ratio["mean"], ratio["low"], ratio["high"]) == pytest.approx((0.5, 0.5, 0.5))


def test_what_does_not_fit_the_context_is_refused(moe):
    with pytest.raises(DataError, match="do not fit the context"):
        benchmark_artifact(moe, BenchSizes(prompt=10**6))
