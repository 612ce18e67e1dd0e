"""Learned switches: one step and a whole training against slow ones, the budget, weights that come back, bits."""

import itertools
import math

import pytest
import torch

from freemoe.core.errors import NumericError
from freemoe.domain_experts.purify import learned
from freemoe.domain_experts.purify.batches import rows_of
from freemoe.domain_experts.purify.learned import draw_steps, learn_switches
from freemoe.models.switching import switched_off
from tests.domain_experts.purify.test_greedy import batches, bits, purify, unchanged
from tests.domain_experts.slow_learning import slow_learn
from tests.masks import indices_of, mask_of
from tests.tiny import model_and_weights, tiny_model

QUICK = {"budget": 0.02, "steps": 24, "step_tokens": 8, "every": 4}


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_training_equals_a_slow_one(case):
    model, weights = model_and_weights(case)
    gradient, stop, told = [*batches(0, 50), *batches(3, 50)], batches(1), []
    quick = {**QUICK, "step_tokens": 20}
    found = purify(learn_switches, model, gradient, stop, patience=99, on_round=lambda *a: told.append(a), **quick)
    losses, masks, paces = slow_learn(model, weights, gradient, stop, **quick)
    assert found.losses == pytest.approx(losses, abs=2e-3)
    assert found.losses[1:] != pytest.approx([losses[0]] * 6, abs=0.02)
    assert max(paces) > 1 > 0.5 > paces[0]
    assert [(n, loss) for n, loss, _ in told] == list(enumerate(found.losses))[1:]
    assert found.losses[found.best] == min(found.losses)
    expected = mask_of(masks[found.best], weights)
    assert found.mask.difference(expected).count <= 0.02 * found.mask.count > 0
    assert found.mask.count == pytest.approx(expected.count, rel=0.02)


def test_weights_come_back_and_the_budget_holds(monkeypatch):
    model, weights = model_and_weights("llama")
    seen, shares = [], []  # the masks under which the model was run, and the shares that were told
    monkeypatch.setattr(learned, "switched_off", lambda w, mask: seen.append(mask) or switched_off(w, mask))
    quick = {**QUICK, "budget": 0.01, "patience": 99, "on_round": lambda *told: shares.append(told[2])}
    purify(learn_switches, model, batches(0, 24), batches(1), **quick)
    most = int(0.01 * sum(w.size for w in weights))
    sizes = [mask.count for mask in seen]
    assert max(sizes) == most
    assert max(shares) <= 0.01
    assert sum(a.difference(b).count for a, b in itertools.pairwise(seen)) > 10
    assert sizes[:2] == [0, 0]  # the base's own loss, and the first step
    assert sizes[2] > 0


def test_switches_are_found_beside_many_weights_that_are_off_already():
    model, weights = model_and_weights("llama")
    generator = torch.Generator().manual_seed(0)
    dead = {w.name: torch.randperm(w.size, generator=generator)[: w.size // 4].sort().values for w in weights}
    rows = batches(0, 24)
    with switched_off(weights, mask_of(dead, weights)):
        found = purify(learn_switches, model, rows, rows, **QUICK)
        assert found.losses[found.best] < found.losses[0]
        assert found.losses[found.best] == min(found.losses)
    assert found.mask.difference(mask_of(dead, weights)).count == found.mask.count > 0


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
    before, passes, real = bits(model), itertools.count(), learned.backward

    def broken(*given):
        if next(passes) == 8:
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
    model, weights = model_and_weights("llama")
    before, passes = bits(model), itertools.count()
    weights[2].parameter.register_hook(lambda gradient: gradient * (math.nan if next(passes) >= 6 else 1))
    with pytest.raises(NumericError, match=r"Learned switches, step [1-9]\d*, \d+ weights off: .*" + weights[2].name):
        purify(learn_switches, model, batches(0, 24), batches(1), **QUICK)
    assert unchanged(model, before)


def test_every_document_is_drawn_once_per_pass():
    rows = [*batches(0, count=7), *batches(1, count=5)]
    documents = rows_of(rows)
    steps, again = (list(itertools.islice(draw_steps(rows, 4, 3), 12)) for _ in range(2))
    assert {sum(len(b.ids) for b in step) for step in steps} == {2}
    assert max(b.ids.numel() for step in steps for b in step) <= max(b.ids.numel() for b in rows)
    drawn = [rows_of(step) for step in steps]
    for once in (drawn[:6], drawn[6:]):
        assert sorted(itertools.chain(*once)) == sorted(documents)
    assert drawn[:6] != drawn[6:]
    assert [rows_of(step) for step in again] == drawn
    assert sorted(rows_of(next(draw_steps(rows, 10**6, 0)))) == sorted(documents)
