"""Learned switches: one step and a whole training against slow ones, the budget, weights that come back, bits."""

import math
from itertools import pairwise

import pytest
import torch

from freemoe.core.errors import DataError, NumericError, RecipeError
from freemoe.domain_experts.purify import learned
from freemoe.domain_experts.purify.batches import AnswerBatch, mean_loss, rows_of
from freemoe.domain_experts.purify.learned import draw_steps, learn_switches
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.domain_experts.purify.test_greedy import batches, unchanged
from tests.domain_experts.slow_learning import masked_gradients, slow_learn
from tests.masks import indices_of, mask_of
from tests.tiny import tiny_model

LAYOUTS = ["llama", "gpt2", "mixtral", "gpt_oss"]
QUICK = {"budget": 0.02, "steps": 24, "step_tokens": 8, "every": 4}


def bits_of(model):
    """Every parameter's bits, whatever its dtype."""
    return {k: v.detach().clone().view(torch.uint8) for k, v in model.state_dict().items()}


def spied(monkeypatch):
    """The masks under which `learn_switches` ran the model, in order."""
    seen = []
    real = learned.switched_off

    def spy(weights, mask):
        seen.append({name: set(p.tolist()) for name, p in indices_of(mask).items()})
        return real(weights, mask)

    monkeypatch.setattr(learned, "switched_off", spy)
    return seen


# ------------------------------------------------------------ a whole training


@pytest.mark.parametrize("case", LAYOUTS)
def test_training_equals_a_slow_one(case):
    model = tiny_model(case)
    weights = find_weights(model)
    gradient, stop = [*batches(0, 50), *batches(3, 50)], batches(1)
    quick = {**QUICK, "step_tokens": 20}
    told = []
    found = learn_switches(model, weights, gradient, stop, patience=99, on_round=lambda *a: told.append(a), **quick)
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
    found = learn_switches(model, weights, batches(0, 24), stop, **QUICK)
    assert found.losses[0] == mean_loss(model, stop)
    with switched_off(weights, found.mask):
        after = mean_loss(model, stop)
    assert after == found.losses[found.best] < found.losses[0]
    for where in indices_of(found.mask).values():
        assert (where[1:] > where[:-1]).all()
    # The forecast: the base's gradient and curvature on stopping documents, and what really comes.
    first = masked_gradients(model, weights, {}, stop)
    sums = [
        float((w.canonical_view().reshape(-1) * g)[indices_of(found.mask)[w.name]].sum())
        for w, g in zip(weights, first, strict=True)
        if w.name in indices_of(found.mask)
    ]
    assert found.forecast.first_order == pytest.approx(sum(sums), rel=1e-3)
    assert found.forecast.measured == pytest.approx(found.losses[0] - after, abs=1e-6)
    assert found.forecast.disturbance > 0


def test_weights_come_back_and_the_budget_holds(monkeypatch):
    model = tiny_model("llama")
    weights = find_weights(model)
    seen = spied(monkeypatch)
    shares = []
    quick = {**QUICK, "budget": 0.01}
    learn_switches(
        model, weights, batches(0, 24), batches(1), patience=99, on_round=lambda r, loss, s: shares.append(s), **quick
    )
    most = int(0.01 * sum(w.size for w in weights))
    sizes = [sum(map(len, mask.values())) for mask in seen]
    assert max(sizes) == most
    assert max(shares) <= 0.01
    back = sum(len(a.get(n, set()) - b.get(n, set())) for a, b in pairwise(seen) for n in a)
    assert back > 10
    assert sizes[:2] == [0, 0]  # the base's own loss, and the first step
    assert sizes[2] > 0


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
    found = learn_switches(model, weights, batches(0, 24), batches(0, 24), **{**QUICK, "steps": 12})
    assert found.best > 0
    assert found.mask.count > 0
    assert all(torch.equal(v, before[k]) for k, v in bits_of(model).items())
    for name, p in model.named_parameters():
        assert p.requires_grad == flags[name][0]
        assert p.grad is flags[name][1]


def test_a_budget_below_one_weight_is_the_base():
    model = tiny_model("llama")
    weights = find_weights(model)
    found = learn_switches(model, weights, batches(0), batches(1), budget=0.5 / sum(w.size for w in weights))
    assert (indices_of(found.mask), found.best, len(found.losses), found.forecast) == ({}, 0, 1, None)


def test_nothing_goes_off_where_nothing_hurts():
    model = tiny_model("llama")
    weights = find_weights(model)
    for weight in weights:
        weight.parameter.data.zero_()
    found = learn_switches(model, weights, batches(0), batches(1), **QUICK)
    assert (indices_of(found.mask), found.best, len(found.losses), found.forecast) == ({}, 0, 1, None)


def test_switches_are_found_beside_many_weights_that_are_off_already():
    model = tiny_model("llama")
    weights = find_weights(model)
    generator = torch.Generator().manual_seed(0)
    dead = {w.name: torch.randperm(w.size, generator=generator)[: w.size // 4].sort().values for w in weights}
    rows = batches(0, 24)
    with switched_off(weights, mask_of(dead, weights)):
        found = learn_switches(model, weights, rows, rows, **QUICK)
        assert found.losses[found.best] < found.losses[0]
        assert found.losses[found.best] == min(found.losses)
    gone = sum(len(set(p.tolist()) & set(dead[n].tolist())) for n, p in indices_of(found.mask).items())
    assert found.mask.count > gone == 0


def test_base_is_kept_when_every_round_is_worse():
    model = tiny_model("llama")
    weights = find_weights(model)
    before = {k: v.detach().clone().view(torch.int32) for k, v in model.state_dict().items()}
    rank = batches(0, 24)
    # The stopping documents want the base's own next tokens, so that every change is for the worse.
    stop = []
    for batch in rank:
        own = model(input_ids=batch.ids).logits.argmax(-1)
        stop.append(AnswerBatch(batch.ids, batch.mask, torch.where(batch.targets == -100, -100, own), batch.labels))
    found = learn_switches(model, weights, rank, stop, **{**QUICK, "patience": 2})
    assert (indices_of(found.mask), found.best, len(found.losses)) == ({}, 0, 3)
    assert unchanged(model, before)


def test_checkpointing_and_seeds():
    model = tiny_model("mixtral")
    weights = find_weights(model)
    rows = [*batches(0, 12), *batches(2, 12)]

    def run(**more):
        found = learn_switches(model, weights, rows, batches(1), patience=99, **{**QUICK, "steps": 12, **more})
        return found.losses, {n: p.tolist() for n, p in indices_of(found.mask).items()}

    plain = run()
    assert run() == plain
    assert run(checkpointing=True) == plain
    assert run(seed=5)[0] != plain[0]


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    model = tiny_model("gpt2")
    weights = find_weights(model)
    rows = batches(0, 24)
    before = bits_of(model)
    calls = []

    def late(*_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_switches(model, weights, rows, batches(1), on_round=late, **QUICK)
    real = learned.backward

    def broken(*given):
        calls.append(1)
        if len(calls) > 8:
            # In the midst of a step: the mask is in place.
            assert any(not torch.equal(v, before[k]) for k, v in bits_of(model).items())
            raise MemoryError
        return real(*given)

    calls.clear()
    monkeypatch.setattr(learned, "backward", broken)
    with pytest.raises(MemoryError):
        learn_switches(model, weights, rows, batches(1), **QUICK)
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
    with pytest.raises(NumericError, match=r"Learned switches, step [1-9]\d*, \d+ weights off: .*" + weights[2].name):
        learn_switches(model, weights, batches(0, 24), batches(1), **QUICK)
    assert all(torch.equal(v, before[k]) for k, v in bits_of(model).items())


# ------------------------------------------------------------------- documents


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


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"budget": 0.0}, RecipeError, "budget is 0.0"),
        ({"budget": 1.5}, RecipeError, "budget is 1.5"),
    ],
)
def test_bad_shares(bad, error, message):
    model = tiny_model("llama")
    with pytest.raises(error, match=message):
        learn_switches(model, find_weights(model), batches(0), batches(1), **{**QUICK, **bad})


@pytest.mark.parametrize("missing", ["gradient", "stop"])
def test_no_documents(missing):
    model = tiny_model("llama")
    given = [[] if missing == "gradient" else batches(0), [] if missing == "stop" else batches(1)]
    with pytest.raises(DataError, match="0"):
        learn_switches(model, find_weights(model), *given)
