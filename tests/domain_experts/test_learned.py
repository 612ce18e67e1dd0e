"""Learned switches: one step and a whole training against slow ones, the budget, weights that come back, bits."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from freemoe.domain_experts import learned
from freemoe.domain_experts.batches import mean_loss, rows_of
from freemoe.domain_experts.gradients import Leaders, noise_weights
from freemoe.domain_experts.learned import Switches, draw, exchange, learn, off, train_step
from freemoe.domain_experts.switching import count, switched_off
from freemoe.errors import DataError, NumericError, RecipeError
from freemoe.families.weights import find_weights
from tests.domain_experts.slow_learning import slow_learn, straight_through
from tests.domain_experts.test_saliency import batches, unchanged
from tests.tiny import tiny_model

LAYOUTS = ["llama", "gpt2", "mixtral", "gpt_oss"]
QUICK = {"budget": 0.02, "candidates": 0.2, "steps": 24, "step_tokens": 8, "every": 4}


def bits_of(model):
    """Every parameter's bits, whatever its dtype."""
    return {k: v.detach().clone().view(torch.uint8) for k, v in model.state_dict().items()}


def spied(monkeypatch):
    """The masks under which `learn` ran the model, in order."""
    seen = []
    real = learned.switched_off

    def spy(weights, positions):
        seen.append({name: set(p.tolist()) for name, p in positions.items()})
        return real(weights, positions)

    monkeypatch.setattr(learned, "switched_off", spy)
    return seen


# ------------------------------------------------------------------- one step


@pytest.mark.parametrize("case", LAYOUTS)
def test_slopes_equal_autograd_through_an_explicit_mask(case):
    model = tiny_model(case)
    weights = find_weights(model)
    rows = batches(0)
    mask = noise_weights(model, weights, batches(1), 200, spread=1e9)
    expected = straight_through(model, weights, mask, rows)
    switches = [Switches.fresh(w, torch.arange(0, w.size, 3)) for w in weights]
    with switched_off(weights, mask):
        slopes = learned._slopes(model, switches, rows, None, False)
    some = 0
    for switch, slow in zip(switches, expected, strict=True):
        fast = slopes[switch.weight.name] * switch.weight.view().reshape(-1)[switch.positions]
        torch.testing.assert_close(fast, slow[switch.positions], rtol=1e-3, atol=1e-6, msg=switch.weight.name)
        gone = torch.isin(switch.positions, mask.get(switch.weight.name, torch.empty(0, dtype=torch.long)))
        some += int((slow[switch.positions][gone] != 0).sum())
    # Weights that are off have slopes of their own: that is how they come back.
    assert some > 10


def test_a_step_equals_adam_with_a_common_floor():
    model = tiny_model("llama")
    weights = find_weights(model)[:3]
    generator = torch.Generator().manual_seed(0)
    switches = [Switches.fresh(w, torch.arange(5 + i)) for i, w in enumerate(weights)]
    score, mean, square = (np.zeros(5 + 6 + 7) for _ in range(3))
    for step in range(1, 7):
        gradients = {w.name: torch.randn(5 + i, generator=generator) * 10.0**-i for i, w in enumerate(weights)}
        if step == 3:
            del gradients[weights[1].name]
        train_step(switches, gradients, step, 8)
        parts = [gradients.get(w.name, torch.zeros(5 + i)) for i, w in enumerate(weights)]
        g = np.concatenate([p.double().numpy() for p in parts])
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        right, size = mean / (1 - 0.9**step), square / (1 - 0.999**step)
        score -= (1 + math.cos(math.pi * step / 8)) / 2 * right / (np.sqrt(size) + np.sqrt(size.mean()))
    found = np.concatenate([s.scores.numpy() for s in switches])
    np.testing.assert_allclose(found, score, rtol=1e-4, atol=1e-6)


def test_the_last_step_moves_nothing_and_no_gradient_moves_nothing():
    (weight, *_) = find_weights(tiny_model("llama"))
    for gradient, step in ((torch.ones(4), 9), (torch.zeros(4), 2)):
        switch = Switches.fresh(weight, torch.arange(4))
        train_step([switch], {weight.name: gradient}, step, 9)
        assert torch.equal(switch.scores, torch.zeros(4))


def test_off_takes_the_lowest_below_zero():
    a, b = find_weights(tiny_model("llama"))[:2]
    switches = [Switches.fresh(w, torch.tensor([3, 5, 8])) for w in (a, b)]
    switches[0].scores[:] = torch.tensor([-1.0, 0.0, -3.0])
    switches[1].scores[:] = torch.tensor([2.0, -2.0, -0.5])
    as_lists = [{n: p.tolist() for n, p in off(switches, most).items()} for most in (0, 1, 2, 3, 9)]
    assert as_lists == [
        {}, {a.name: [8]}, {a.name: [8], b.name: [5]}, {a.name: [3, 8], b.name: [5]}, {a.name: [3, 8], b.name: [5, 8]}
    ]  # fmt: skip


def test_exchange_keeps_the_lowest_and_what_they_know():
    model = tiny_model("llama")
    weights = find_weights(model)[:2]
    rows = batches(0)
    switches = [Switches.fresh(w, torch.arange(10, 20)) for w in weights]
    for switch in switches:
        switch.scores[:] = torch.linspace(-1, 1, 10)
        switch.mean[:] = switch.positions + 0.5
        switch.square[:] = switch.positions * 2.0
    known = {s.weight.name: s.positions for s in switches}
    leaders = Leaders(weights, 10, 1e9, known)
    learned._slopes(model, switches, rows, leaders, False)
    new = leaders.positions()
    assert sum(map(len, new.values())) == 10
    after = exchange(switches, leaders, 3)
    assert sum(len(s.scores) for s in after) == 20
    for before, switch in zip(switches, after, strict=True):
        fresh = new.get(switch.weight.name, torch.empty(0, dtype=torch.long))
        assert switch.positions.tolist() == sorted([*before.positions[:5].tolist(), *fresh.tolist()])
        assert not set(fresh.tolist()) & set(before.positions.tolist())
        old = torch.isin(switch.positions, before.positions)
        assert torch.equal(switch.scores[old], before.scores[:5])
        assert torch.equal(switch.mean[old], switch.positions[old] + 0.5)
        assert torch.equal(switch.square[old], switch.positions[old] * 2.0)
        for state in (switch.scores, switch.mean, switch.square):
            assert not state[~old].any()
    # What is off stays, however many that are.
    assert sum(len(s.scores) for s in exchange(switches, leaders, 19)) >= 19
    stay = {p for s in exchange(switches, leaders, 19) for p in s.positions.tolist()}
    assert set(range(10, 19)) <= stay


# ------------------------------------------------------------ a whole training


@pytest.mark.parametrize("case", LAYOUTS)
def test_training_equals_a_slow_one(case, monkeypatch):
    # A tensor remembers all of its weights, and every step of a round is watched.
    monkeypatch.setattr(learned, "_SPREAD", 1e9)
    model = tiny_model(case)
    weights = find_weights(model)
    gradient, stop = [*batches(0), *batches(3)], batches(1)
    told = []
    found = learn(model, weights, gradient, stop, patience=99, on_round=lambda *a: told.append(a), **QUICK)
    losses, masks = slow_learn(model, weights, gradient, stop, **QUICK)
    assert found.losses == pytest.approx(losses, abs=1e-3)
    assert found.losses[1:] != pytest.approx([losses[0]] * 6, abs=0.1)
    assert [(n, loss) for n, loss, _ in told] == list(enumerate(found.losses))[1:]
    assert found.losses[found.best] == min(found.losses)
    expected = masks[found.best]
    same = sum(len(set(p.tolist()) & set(expected.get(n, torch.empty(0)).tolist())) for n, p in found.positions.items())
    assert same >= 0.99 * count(found.positions) > 0
    assert count(found.positions) == count(expected)


def test_what_is_kept_gives_the_loss_that_was_seen():
    model = tiny_model("llama")
    weights = find_weights(model)
    stop = batches(1)
    found = learn(model, weights, batches(0), stop, **QUICK)
    assert found.losses[0] == mean_loss(model, stop)
    with switched_off(weights, found.positions):
        assert mean_loss(model, stop) == found.losses[found.best] < found.losses[0]
    for where in found.positions.values():
        assert (where[1:] > where[:-1]).all()


def test_weights_come_back_and_the_budget_holds(monkeypatch):
    model = tiny_model("llama")
    weights = find_weights(model)
    seen = spied(monkeypatch)
    shares = []
    learn(model, weights, batches(0), batches(1), patience=99, on_round=lambda r, loss, s: shares.append(s), **QUICK)
    most = int(QUICK["budget"] * sum(w.size for w in weights))
    sizes = [sum(map(len, mask.values())) for mask in seen]
    assert max(sizes) == most
    assert max(shares) <= QUICK["budget"]
    back = sum(len(a.get(n, set()) - b.get(n, set())) for a, b in pairwise(seen) for n in a)
    assert back > 10
    # The budget opens over the first sixth of the steps.
    assert sizes[0] == 0 < sizes[1] < most


def test_candidates_are_exchanged(monkeypatch):
    model = tiny_model("llama")
    weights = find_weights(model)
    first = noise_weights(model, weights, batches(0), int(0.02 * sum(w.size for w in weights)), spread=1e9)
    found = learn(model, weights, batches(0), batches(0), **{**QUICK, "candidates": 0.02, "patience": 99})
    outside = {n: set(p.tolist()) - set(first.get(n, torch.empty(0)).tolist()) for n, p in found.positions.items()}
    assert sum(map(len, outside.values())) > 0


# ----------------------------------------------------- nothing to do, bits, ends


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "gpt_oss", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_stays_bit_equal(case, dtype):
    model = tiny_model(case).to(dtype)
    weights = find_weights(model)
    flags = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        p.requires_grad_(i % 2 == 0)
        p.grad = torch.full_like(p, 2.0) if i % 3 == 0 else None
        flags[name] = (p.requires_grad, p.grad)
    before = bits_of(model)
    found = learn(model, weights, batches(0), batches(0), **{**QUICK, "steps": 8})
    assert found.best > 0
    assert count(found.positions) > 0
    assert all(torch.equal(v, before[k]) for k, v in bits_of(model).items())
    for name, p in model.named_parameters():
        assert p.requires_grad == flags[name][0]
        assert p.grad is flags[name][1]


def test_a_budget_below_one_weight_is_the_base():
    model = tiny_model("llama")
    weights = find_weights(model)
    found = learn(model, weights, batches(0), batches(1), budget=0.5 / sum(w.size for w in weights))
    assert (found.positions, found.best, len(found.losses)) == ({}, 0, 1)


def test_nothing_goes_off_where_nothing_hurts():
    model = tiny_model("llama")
    weights = find_weights(model)
    for weight in weights:
        weight.parameter.data.zero_()
    found = learn(model, weights, batches(0), batches(1), **QUICK)
    assert (found.positions, found.best, len(found.losses)) == ({}, 0, 1)


def test_base_is_kept_when_every_round_is_worse():
    model = tiny_model("llama")
    weights = find_weights(model)
    before = {k: v.detach().clone().view(torch.int32) for k, v in model.state_dict().items()}
    rank = batches(0)
    # The stopping documents want the base's own next tokens, so that every change is for the worse.
    stop = []
    for batch in batches(0):
        own = model(input_ids=batch.ids).logits.argmax(-1)
        stop.append(
            learned.AnswerBatch(batch.ids, batch.mask, torch.where(batch.targets == -100, -100, own), batch.labels)
        )
    found = learn(model, weights, rank, stop, **{**QUICK, "patience": 2})
    assert (found.positions, found.best, len(found.losses)) == ({}, 0, 3)
    assert unchanged(model, before)


def test_checkpointing_seeds_and_threads():
    model = tiny_model("mixtral")
    weights = find_weights(model)
    rows = [*batches(0), *batches(2)]

    def run(**more):
        found = learn(model, weights, rows, batches(1), patience=99, **{**QUICK, "steps": 12, **more})
        return found.losses, {n: p.tolist() for n, p in found.positions.items()}

    plain = run()
    assert run() == plain
    assert run(checkpointing=True) == plain
    assert run(seed=5)[0] != plain[0]


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    model = tiny_model("gpt2")
    weights = find_weights(model)
    before = bits_of(model)
    calls = []

    def late(*_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(model, weights, batches(0), batches(1), on_round=late, **QUICK)
    real = learned.backward

    def broken(model, rows):
        calls.append(1)
        if len(calls) > 8:
            # In the midst of a step: the mask is in place.
            assert any(not torch.equal(v, before[k]) for k, v in bits_of(model).items())
            raise MemoryError
        return real(model, rows)

    calls.clear()
    monkeypatch.setattr(learned, "backward", broken)
    with pytest.raises(MemoryError):
        learn(model, weights, batches(0), batches(1), **QUICK)
    assert all(torch.equal(v, before[k]) for k, v in bits_of(model).items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_broken_numbers_name_the_step():
    model = tiny_model("llama")
    weights = find_weights(model)
    calls = []

    def hook(gradient):
        calls.append(1)
        return gradient * (math.nan if len(calls) > 6 else 1)

    weights[2].parameter.register_hook(hook)
    before = bits_of(model)
    with pytest.raises(NumericError, match=r"Learned switches, step \d+, \d+ weights off: .*" + weights[2].name):
        learn(model, weights, batches(0), batches(1), **QUICK)
    assert all(torch.equal(v, before[k]) for k, v in bits_of(model).items())


# ------------------------------------------------------------------- documents


def test_every_document_is_drawn_once_per_pass():
    rows = [*batches(0, count=7), *batches(1, count=5)]
    documents = rows_of(rows)
    drawn = draw(rows, 4, 3)
    steps = [next(drawn) for _ in range(12)]
    sizes = [sum(len(b.ids) for b in step) for step in steps]
    assert set(sizes) == {2}
    assert max(b.ids.numel() for step in steps for b in step) <= max(b.ids.numel() for b in rows)
    for first in (0, 6):
        found = [row for step in steps[first : first + 6] for row in rows_of(step)]
        assert sorted(found) == sorted(documents)
    assert [rows_of(s) for s in steps[:6]] != [rows_of(s) for s in steps[6:]]
    again = draw(rows, 4, 3)
    assert [rows_of(next(again)) for _ in range(12)] == [rows_of(s) for s in steps]
    everything = next(draw(rows, 10**6, 0))
    assert sorted(rows_of(everything)) == sorted(documents)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"budget": 0.0}, RecipeError, "budget is 0.0"),
        ({"budget": 1.5}, RecipeError, "budget is 1.5"),
        ({"budget": 0.3, "candidates": 0.2}, RecipeError, "at least the budget"),
        ({"candidates": 1.1}, RecipeError, "at most 1"),
    ],
)
def test_bad_shares(bad, error, message):
    model = tiny_model("llama")
    with pytest.raises(error, match=message):
        learn(model, find_weights(model), batches(0), batches(1), **{**QUICK, **bad})


@pytest.mark.parametrize("missing", ["gradient", "stop"])
def test_no_documents(missing):
    model = tiny_model("llama")
    given = [[] if missing == "gradient" else batches(0), [] if missing == "stop" else batches(1)]
    with pytest.raises(DataError, match="0"):
        learn(model, find_weights(model), *given)
