"""The server under many clients, and that the soak sees what it is there to see."""

import math
import time

import pytest
import torch

from benchmarks.serve.material import NAMES, generated, random_experts, wishes
from freemoe import FreeMoE
from tests.hardening import full
from tests.hardening.soak import soak
from tests.tiny import tiny_model, tiny_tokenizer

ABOUT = "the server for ten minutes: wrong answers, errors without a cause, leaks (T19)"


def test_some_seconds():
    found = soak.run(3.0, 0, clients=4, requests=12)
    values = {figure.name: figure.value for figure in found.figures}
    assert values["answers that differ from those of single requests"] == 0
    assert values["errors without a cause"] == 0, found.details["errors"]
    assert found.details["counts"]["right"] > 0
    assert found.details["counts"]["loads"] > 0


@pytest.mark.hardening
def test_ten_minutes():
    began = time.perf_counter()
    found = soak.run(soak.SECONDS * full.SHARE, full.SEED)
    assert not full.keep("soak", ABOUT, found, began)


def test_a_wrong_answer_is_counted_and_a_tie_apart():
    seen = {"counts": {"differs": 3, "right": 5, "errors": 1}, "differs": [], "errors": ["x"]}
    found = soak.outcome(seen, [1e-5, 0.3, 2.0], [], 0, 60)
    assert [figure.value for figure in found.figures[:2]] == [2, 1]
    assert [figure.verdict(quick=False) for figure in found.figures[:2]] == ["missed", "missed"]
    assert "1 more at ties" in found.figures[0].note


def test_growth_of_memory():
    assert soak.growth([100] * 50) == 0
    assert soak.growth([50] * 10 + [100] * 20 + [110] * 20) == pytest.approx(10)
    assert math.isnan(soak.growth([1, 2]))


def test_where_two_answers_part():
    model = tiny_model("llama", num_hidden_layers=1)
    moe = FreeMoE(model, random_experts(model, NAMES, 0), None, tiny_tokenizer())
    assert moe.experts == list(NAMES)
    [wish] = wishes(moe, 1, 6, ["two"], 3)
    true = generated(moe, wish)
    text = soak._text(moe, true)
    with torch.no_grad():
        logits = moe(torch.tensor([[*wish.prompt, *true]]), expert="two").logits[0, len(wish.prompt) - 1 : -1]
    best = logits.topk(2, dim=-1).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    assert soak.gap(moe, wish, true, "\x00never") == pytest.approx(gaps[0], abs=1e-4)
    assert soak.gap(moe, wish, true, text) <= min(gaps[-3:]) + 1e-4
