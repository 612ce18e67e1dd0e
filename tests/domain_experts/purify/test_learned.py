"""Learned switches: one step and a whole training against slow ones, the budget, weights that come back, bits."""

import math
from itertools import pairwise

import pytest
import torch

from freemoe.core.errors import NumericError
from freemoe.domain_experts.purify import learned
from freemoe.domain_experts.purify.batches import mean_loss, rows_of
from freemoe.domain_experts.purify.learned import draw_steps, learn_switches
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.domain_experts.purify.test_greedy import batches, bits, purify, unchanged
from tests.domain_experts.slow_learning import slow_learn
from tests.masks import indices_of, mask_of
from tests.tiny import tiny_model

QUICK = {"budget": 0.02, "steps": 24, "step_tokens": 8, "every": 4}


def spied(monkeypatch):
    """The masks under which `learn_switches` ran the model, in order."""
    seen = []
    real = learned.switched_off

    def spy(weights, mask):
        seen.append({name: set(p.tolist()) for name, p in indices_of(mask).items()})
        return real(weights, mask)

    monkeypatch.setattr(learned, "switched_off", spy)
    return seen


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_training_equals_a_slow_one(case):
    model = tiny_model(case)
    weights = find_weights(model)
    gradient, stop = [*batches(0, 50), *batches(3, 50)], batches(1)
    quick = {**QUICK, "step_tokens": 20}
    told = []
    found = purify(learn_switches, model, gradient, stop, patience=99, on_round=lambda *a: told.append(a), **quick)
    losses, masks, paces = slow_learn(model, weights, gradient, stop, **quick)
    assert found.losses == pytest.approx(losses, abs=2e-3)
    assert found.losses[1:] != pytest.approx([losses[0]] * 6, abs=0.02)
    assert max(paces) > 1 > 0.5 > paces[0]
    assert [(n, loss) for n, loss, _ in told] == list(enumerate(found.losses))[1:]
    assert found.losses[found.best] == min(found.losses)
    expected = masks[found.best]
    same = sum(
        len(set(p.tolist()) & set(expected.get(n, torch.empty(0)).tolist())) for n, p in indices_of(found.mask).items()
    )
    assert same >= 0.98 * found.mask.count > 0
    assert found.mask.count == pytest.approx(sum(map(len, expected.values())), rel=0.02)


def test_what_is_kept_gives_the_loss_that_was_seen():
    model = tiny_model("llama")
    weights = find_weights(model)
    stop = batches(1)
    found = purify(learn_switches, model, batches(0, 24), stop, **QUICK)
    assert found.losses[0] == mean_loss(model, stop)
    with switched_off(weights, found.mask):
        after = mean_loss(model, stop)
    assert after == found.losses[found.best] < found.losses[0]
    for where in indices_of(found.mask).values():
        assert (where[1:] > where[:-1]).all()
    # What it is made of, test_curvature.py shows.
    assert found.forecast.measured == pytest.approx(found.losses[0] - after, abs=1e-6)
    assert found.forecast.disturbance > 0


def test_weights_come_back_and_the_budget_holds(monkeypatch):
    model = tiny_model("llama")
    weights = find_weights(model)
    seen = spied(monkeypatch)
    shares = []
    quick = {**QUICK, "budget": 0.01, "patience": 99, "on_round": lambda r, loss, share: shares.append(share)}
    purify(learn_switches, model, batches(0, 24), batches(1), **quick)
    most = int(0.01 * sum(w.size for w in weights))
    sizes = [sum(map(len, mask.values())) for mask in seen]
    assert max(sizes) == most
    assert max(shares) <= 0.01
    back = sum(len(a.get(n, set()) - b.get(n, set())) for a, b in pairwise(seen) for n in a)
    assert back > 10
    assert sizes[:2] == [0, 0]  # the base's own loss, and the first step
    assert sizes[2] > 0


def test_switches_are_found_beside_many_weights_that_are_off_already():
    model = tiny_model("llama")
    weights = find_weights(model)
    generator = torch.Generator().manual_seed(0)
    dead = {w.name: torch.randperm(w.size, generator=generator)[: w.size // 4].sort().values for w in weights}
    rows = batches(0, 24)
    with switched_off(weights, mask_of(dead, weights)):
        found = purify(learn_switches, model, rows, rows, **QUICK)
        assert found.losses[found.best] < found.losses[0]
        assert found.losses[found.best] == min(found.losses)
    gone = sum(len(set(p.tolist()) & set(dead[n].tolist())) for n, p in indices_of(found.mask).items())
    assert found.mask.count > gone == 0


def test_checkpointing_and_seeds():
    model = tiny_model("mixtral")
    rows = [*batches(0, 12), *batches(2, 12)]

    def run(**more):
        found = purify(learn_switches, model, rows, batches(1), patience=99, **{**QUICK, "steps": 12, **more})
        return found.losses, {n: p.tolist() for n, p in indices_of(found.mask).items()}

    plain = run()
    assert run() == plain
    assert run(checkpointing=True) == plain
    assert run(seed=5)[0] != plain[0]


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    model = tiny_model("gpt2")
    before = bits(model)
    calls, real = [], learned.backward

    def broken(*given):
        calls.append(1)
        if len(calls) > 8:
            # In the midst of a step: the mask is in place.
            assert not unchanged(model, before)
            raise MemoryError
        return real(*given)

    monkeypatch.setattr(learned, "backward", broken)
    with pytest.raises(MemoryError):
        purify(learn_switches, model, batches(0, 24), batches(1), **QUICK)
    assert unchanged(model, before)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_broken_numbers_name_the_step():
    model = tiny_model("llama")
    weights = find_weights(model)
    calls = []

    def hook(gradient):
        calls.append(1)
        return gradient * (math.nan if len(calls) > 6 else 1)

    weights[2].parameter.register_hook(hook)
    before = bits(model)
    with pytest.raises(NumericError, match=r"Learned switches, step [1-9]\d*, \d+ weights off: .*" + weights[2].name):
        purify(learn_switches, model, batches(0, 24), batches(1), **QUICK)
    assert unchanged(model, before)


def test_every_document_is_drawn_once_per_pass():
    rows = [*batches(0, count=7), *batches(1, count=5)]
    documents = rows_of(rows)
    drawn = draw_steps(rows, 4, 3)
    steps = [next(drawn) for _ in range(12)]
    sizes = [sum(len(b.ids) for b in step) for step in steps]
    assert set(sizes) == {2}
    assert max(b.ids.numel() for step in steps for b in step) <= max(b.ids.numel() for b in rows)
    for first in (0, 6):
        found = [row for step in steps[first : first + 6] for row in rows_of(step)]
        assert sorted(found) == sorted(documents)
    assert [rows_of(s) for s in steps[:6]] != [rows_of(s) for s in steps[6:]]
    again = draw_steps(rows, 4, 3)
    assert [rows_of(next(again)) for _ in range(12)] == [rows_of(s) for s in steps]
    everything = next(draw_steps(rows, 10**6, 0))
    assert sorted(rows_of(everything)) == sorted(documents)
