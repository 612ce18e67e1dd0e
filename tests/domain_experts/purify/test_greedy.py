"""Greedy purification: what it cuts and keeps, and that the model stays as it was."""

import itertools
import math

import pytest
import torch

from freemoe.core.errors import DataError, NumericError
from freemoe.core.run.unit_state import NO_CHECKPOINT
from freemoe.domain_experts.purify import greedy as saliency
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches, mean_loss
from freemoe.domain_experts.purify.curvature import measure_curvature
from freemoe.domain_experts.purify.gradients import noise_weights
from freemoe.domain_experts.purify.greedy import PurifyTask, greedy_purify, removal_penalty, split_batches
from freemoe.domain_experts.purify.learned import learn_switches
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.masks import indices_of
from tests.tiny import bits, model_and_weights, tiny_model, unchanged

LAYOUTS = ["llama", "gpt2", "mixtral", "gpt_oss", "gemma"]


def batches(seed, count=6, budget=40):
    """Prompts with answers; one answer token is frequent, so that something can be learned of it."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 250, (8 + i % 3,), generator=generator).tolist() for i in range(count)]
    return answer_batches([(tuple(ids), (ids[-1], 77)) for ids in prompts], [0] * count, budget, "cpu")


def purify(way, model, gradient, stop, *, on_round=lambda *_: None, checkpoint=NO_CHECKPOINT, seed=0, **section):
    """Run a way of purifying with fields of its recipe section."""
    task = PurifyTask(model, find_weights(model), gradient, stop, seed=seed, on_round=on_round, checkpoint=checkpoint)
    return way(task, SaliencySection(**section))


def with_odd_flags(model):
    """Give some parameters gradients, and let some ask for none; returns what tells whether all is still so."""
    flags = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        p.requires_grad_(i % 2 == 0)
        p.grad = torch.full_like(p, 2.0) if i % 3 == 0 else None
        flags[name] = (p.requires_grad, p.grad)

    def still(name, p):
        asks, gradient = flags[name]
        return p.requires_grad == asks and p.grad is gradient and (gradient is None or bool((gradient == 2).all()))

    return lambda: all(still(name, p) for name, p in model.named_parameters())


WAYS = {
    "greedy": (greedy_purify, {"step": 0.002, "budget": 0.01, "patience": 2}),
    "learned": (learn_switches, {"budget": 0.02, "steps": 12, "step_tokens": 8, "every": 4, "patience": 2}),
}
both_ways = pytest.mark.parametrize(("way", "section"), WAYS.values(), ids=WAYS)


@both_ways
@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_stays_bit_equal(case, dtype, way, section):
    model = tiny_model(case).to(dtype)
    untouched, before = with_odd_flags(model), bits(model)
    found = purify(way, model, batches(0, 24), batches(0, 24), **section)
    assert found.best > 0
    assert found.mask.count > 0
    assert unchanged(model, before)
    assert untouched()


@both_ways
@pytest.mark.parametrize("why", ["the budget is below one weight", "nothing hurts"])
def test_nothing_goes_off(why, way, section):
    model, weights = model_and_weights("llama")
    if why == "nothing hurts":
        for weight in weights:
            weight.parameter.data.zero_()
    else:
        section = {**section, "budget": 0.5 / sum(w.size for w in weights)}
    found = purify(way, model, batches(0), batches(1), **section)
    assert (indices_of(found.mask), found.best, len(found.losses), found.forecast) == ({}, 0, 1, None)


@both_ways
def test_base_is_kept_when_every_round_is_worse(way, section):
    model = tiny_model("llama")
    before = bits(model)
    rank = batches(0, 24)
    # The stopping documents want the base's own next tokens, so that every change is for the worse.
    stop = []
    for batch in rank:
        own = model(input_ids=batch.ids).logits.argmax(-1)
        stop.append(AnswerBatch(batch.ids, batch.mask, torch.where(batch.targets == -100, -100, own), batch.labels))
    found = purify(way, model, rank, stop, **section)
    assert (indices_of(found.mask), found.best, len(found.losses)) == ({}, 0, 3)
    assert unchanged(model, before)


@both_ways
@pytest.mark.parametrize("missing", ["gradient", "stop"])
def test_no_documents(missing, way, section):
    given = [[] if missing == name else batches(0) for name in ("gradient", "stop")]
    with pytest.raises(DataError, match="0"):
        purify(way, tiny_model("llama"), *given, **section)


@both_ways
@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_the_best_round_is_kept(case, way, section):
    model, weights = model_and_weights(case)
    told, stop = [], batches(1)
    found = purify(way, model, batches(0, 24), stop, on_round=lambda *a: told.append(a), **section)
    best = found.losses[found.best]
    assert best == min(found.losses) < found.losses[0] == mean_loss(model, stop)
    assert len(found.losses) - 1 - found.best <= section["patience"]
    assert [(r, loss) for r, loss, _ in told] == list(enumerate(found.losses))[1:]
    known = {w.name: w.size for w in weights}
    for name, where in indices_of(found.mask).items():
        assert (where[1:] > where[:-1]).all()
        assert 0 <= int(where[0]) <= int(where[-1]) < known[name]
    # The same weights off again, all at once, give the very loss that the search saw.
    with switched_off(weights, found.mask):
        assert mean_loss(model, stop) == best
    # What it is made of, test_curvature.py shows.
    assert found.forecast.measured == pytest.approx(found.losses[0] - best, abs=1e-6)
    assert found.forecast.disturbance > 0


@pytest.mark.parametrize(("step", "budget"), [(0.001, 0.0035), (0.001, 0.003), (0.004, 0.0101), (0.02, 0.005)])
def test_the_budget_is_kept(step, budget):
    model, weights = model_and_weights("llama")
    off = []
    # The stopping loss plays no part: patience is endless.
    options = {"step": step, "budget": budget, "patience": 999}
    found = purify(greedy_purify, model, batches(0), batches(0), on_round=lambda *told: off.append(told[2]), **options)
    assert max(off) <= budget
    assert found.mask.count <= budget * sum(w.size for w in weights)
    assert max(off) + step > budget or found.losses[-1] == 0


def test_broken_numbers_leave_the_model_as_it_was():
    model = tiny_model("llama")
    good, rows = batches(0), batches(1)
    bad = answer_batches([((5, 6), (7,))], [0], 100, "cpu")
    model.model.embed_tokens.weight.data[5] = math.nan
    assert all(5 not in b.ids for b in [*good, *rows])
    before = bits(model)
    for gradient, stop in ((bad, rows), (good, bad)):
        with pytest.raises(NumericError, match="NaN or infinit"):
            purify(greedy_purify, model, gradient, stop)
        assert unchanged(model, before)
        assert all(p.requires_grad and p.grad is None for p in model.parameters())

    def late(number, *_):
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        purify(greedy_purify, model, good, rows, step=0.001, patience=9, on_round=late)
    assert unchanged(model, before)


@pytest.mark.parametrize("number", range(3))
def test_a_broken_gradient_names_its_weight(number):
    model, weights = model_and_weights("llama")
    # The curvature takes a pass over the documents, and so does every round.
    good, passes = number * len(batches(0)), itertools.count()
    weights[3].parameter.register_hook(lambda gradient: gradient * (math.inf if next(passes) >= good else 1))
    where = rf"Greedy purification, round {number}, \d+ weights off: .*gradient.*{weights[3].name}"
    with pytest.raises(NumericError, match=where):
        purify(greedy_purify, model, batches(0), batches(0), step=0.001)


def test_parts_share_a_round_and_a_step():
    model, weights = model_and_weights("llama")
    total = sum(w.size for w in weights)
    rows = [*batches(0), *batches(1), *batches(2), *batches(3)]
    tokens = sum(b.answer_tokens for b in rows)
    assert split_batches(rows, tokens) == [rows]
    halves = split_batches(rows, tokens // 2)
    assert sorted(map(id, halves[0] + halves[1])) == sorted(map(id, rows))
    shares = []
    common = {"step": 0.004, "budget": 0.004, "on_round": lambda number, loss, off: shares.append(off)}
    whole = purify(greedy_purify, model, rows, batches(9), part_tokens=tokens, **common)
    parts = purify(greedy_purify, model, rows, batches(9), part_tokens=tokens // 2, **common)
    assert shares == [pytest.approx(0.004, abs=2 / total)] * 2
    # The first half of a cut in two is the strongest of its own part, at the untouched model.
    toll = removal_penalty(measure_curvature(model, weights, halves[0]), sum(b.answer_tokens for b in halves[0]))
    first = noise_weights(model, weights, halves[0], round(0.002 * total), spread=256, toll=toll)[0]
    assert parts.best
    assert first.count > 0 == first.difference(parts.mask).count
    assert len(whole.losses) == len(parts.losses) == 2


def test_a_harmful_round_is_taken_back_and_the_next_is_half_as_large(monkeypatch):
    model, weights = model_and_weights("llama")
    before = bits(model)
    step = round(0.002 * sum(w.size for w in weights))
    # Nats; no round promises as much as the second, fifth and sixth cost. The seventh is worse, but as little as none is.
    losses = [5.0, 9.0, 4.5, 4.0, 8.0, 7.0, 4.0001, 3.9, 9.0, 9.0, 9.0, 9.0]
    off = []

    def told(*_):
        off.append(sum(int((w.parameter == 0).sum()) for w in weights))
        return losses[len(off) - 1]

    monkeypatch.setattr(saliency, "mean_loss", told)
    found = purify(greedy_purify, model, batches(0), batches(1), step=0.002, budget=0.1, patience=4)
    halves, quarter, eighth = step // 2, step // 4, step // 8
    kept = 2 * halves + 2 * eighth
    assert off[:6] == [0, step, halves, 2 * halves, 3 * halves, 2 * halves + quarter]
    assert off[6:] == [2 * halves + eighth, kept, kept + eighth, kept + eighth // 2, kept + 1, kept + 1]
    assert found.losses == tuple(losses)
    assert found.best == 7
    assert found.mask.count == kept
    assert unchanged(model, before)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_the_toll_is_what_a_cut_costs_beyond_first_order_and_what_its_gradient_is_unsure_of(case):
    model, weights = model_and_weights(case)
    curvature = measure_curvature(model, weights, batches(0))
    toll = removal_penalty(curvature, 50)
    for weight in weights:
        h = torch.outer(curvature.outputs[weight.name][0], curvature.inputs[weight.name][0])
        w = weight.canonical_view()[0]
        torch.testing.assert_close(toll(weight)[0], w**2 * h / 2 + w.abs() * (h / 50).sqrt())
