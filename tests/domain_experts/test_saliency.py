"""Signed purification: the sign and size of its scores, what it keeps, and that the model stays as it was."""

import math

import pytest
import torch

from freemoe.domain_experts.batches import answer_batches, mean_loss
from freemoe.domain_experts.saliency import purify, signed_scores, split_batches, strongest
from freemoe.domain_experts.switching import switched_off
from freemoe.errors import DataError, NumericError
from freemoe.families.weights import find_weights
from tests.tiny import tiny_model

LAYOUTS = ["llama", "gpt2", "mixtral", "gpt_oss", "gemma"]


def batches(seed, count=6, budget=40):
    """Prompts with answers; one answer token is frequent, so that something can be learned of it."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        ids = torch.randint(3, 250, (8 + i % 3,), generator=generator).tolist()
        rows.append((tuple(ids), (*ids[-1:], 77)))
    return answer_batches(rows, [0] * count, budget, "cpu")


def bits(model):
    return {k: v.detach().clone().view(torch.int32) for k, v in model.state_dict().items()}


def unchanged(model, before):
    return all(torch.equal(v.view(torch.int32), before[k]) for k, v in model.state_dict().items())


def canonical(weight, tensor):
    """(experts, rows, columns) by naming every axis, not by the code under test."""
    if weight.layout == "columns":
        tensor = tensor.T[None]
    elif weight.layout == "experts_columns":
        tensor = tensor.transpose(1, 2)
    elif weight.layout == "rows":
        tensor = tensor[None]
    return tensor.reshape(-1)


@pytest.mark.parametrize("case", LAYOUTS)
def test_scores_equal_autograd(case):
    model = tiny_model(case)
    weights = find_weights(model)
    rows = batches(0)
    total = torch.zeros(())
    tokens = 0
    for batch in rows:
        logits = model(input_ids=batch.ids).logits
        keep = batch.targets != -100
        total = total - torch.log_softmax(logits[keep], -1)[range(int(keep.sum())), batch.targets[keep]].sum()
        tokens += int(keep.sum())
    gradients = torch.autograd.grad(total / tokens, [w.parameter for w in weights], allow_unused=True)
    found = signed_scores(model, weights, rows)
    for weight, gradient, scores in zip(weights, gradients, found, strict=True):
        gradient = torch.zeros_like(weight.parameter) if gradient is None else gradient
        expected = canonical(weight, weight.parameter.detach() * gradient)
        torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-7, msg=weight.name)
        assert scores.shape == (weight.size,)
        assert not scores.requires_grad
    assert all(w.parameter.grad is None for w in weights)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_score_foretells_the_change_of_the_loss(case):
    model = tiny_model(case)
    weights = find_weights(model)
    rows = batches(0)
    scores = signed_scores(model, weights, rows)
    before = mean_loss(model, rows)
    for weight, score in zip(weights, scores, strict=True):
        at = int(score.abs().argmax())
        e, inside = divmod(at, weight.rows * weight.columns)
        r, c = divmod(inside, weight.columns)
        old = weight.view()[e, r, c].clone()
        weight.view()[e, r, c] = old * 0.99
        change = mean_loss(model, rows) - before
        weight.view()[e, r, c] = old
        assert change == pytest.approx(-0.01 * float(score[at]), rel=0.2, abs=3e-6), weight.name


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_the_top_weight_is_noise_and_a_random_one_is_not(case):
    model = tiny_model(case)
    weights = find_weights(model)
    rows = batches(1)
    scores = signed_scores(model, weights, rows)
    base = mean_loss(model, rows)
    (top,) = [{w.name: p} for w, p in zip(weights, strongest(scores, 1), strict=True) if len(p)]
    with switched_off(weights, top):
        lowered = base - mean_loss(model, rows)
    (bottom,) = [{w.name: p} for w, p in zip(weights, strongest([-s for s in scores], 1), strict=True) if len(p)]
    with switched_off(weights, bottom):
        raised = mean_loss(model, rows) - base
    assert lowered > 0
    assert raised > 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        weight = weights[int(torch.randint(len(weights), (1,), generator=generator))]
        at = torch.randint(weight.size, (1,), generator=generator)
        with switched_off(weights, {weight.name: at}):
            assert base - mean_loss(model, rows) < lowered


@pytest.mark.parametrize("count", [1, 3, 10, 1000])
def test_strongest_equals_sorting_everything(count):
    generator = torch.Generator().manual_seed(count)
    scores = [torch.randn(n, generator=generator) for n in (5, 40, 1, 200)]
    flat = sorted(((-float(v), t, i) for t, s in enumerate(scores) for i, v in enumerate(s)))
    expected = [sorted(i for v, t, i in flat[:count] if t == k and v < 0) for k in range(4)]
    assert [p.tolist() for p in strongest(scores, count)] == expected


def test_strongest_breaks_ties_by_place():
    ties = [torch.tensor([1.0, 2.0, 1.0]), torch.ones(200), torch.zeros(4)]
    assert [p.tolist() for p in strongest(ties, 3)] == [[0, 1, 2], [], []]
    assert [p.tolist() for p in strongest(ties, 7)] == [[0, 1, 2], [0, 1, 2, 3], []]
    assert [p.tolist() for p in strongest([torch.ones(5000)], 10)] == [list(range(10))]
    assert [p.tolist() for p in strongest([-torch.ones(3), torch.zeros(2)], 2)] == [[], []]


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "gemma"])
def test_the_model_stays_bit_equal(case):
    model = tiny_model(case)
    weights = find_weights(model)
    flags = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        p.requires_grad_(i % 2 == 0)
        p.grad = torch.full_like(p, 2.0) if i % 3 == 0 else None
        flags[name] = (p.requires_grad, p.grad)
    before = bits(model)
    found = purify(model, weights, batches(0), batches(1), step=0.002, budget=0.01, patience=2)
    assert len(found.losses) > 1
    assert unchanged(model, before)
    for name, p in model.named_parameters():
        assert p.requires_grad == flags[name][0]
        assert p.grad is flags[name][1]
        assert p.grad is None or (p.grad == 2).all()


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_the_best_round_is_kept(case):
    model = tiny_model(case)
    weights = find_weights(model)
    told = []
    stop = batches(1)
    found = purify(
        model, weights, batches(0), stop, step=0.001, budget=0.02, patience=4, on_round=lambda *a: told.append(a)
    )
    assert found.losses[found.best] == min(found.losses)
    assert found.losses[0] == mean_loss(model, stop)
    assert len(found.losses) - 1 - found.best <= 4
    assert [(r, loss) for r, loss, _ in told] == list(enumerate(found.losses))[1:]
    known = {w.name: w.size for w in weights}
    for name, where in found.positions.items():
        assert (where[1:] > where[:-1]).all()
        assert len(where)
        assert 0 <= int(where[0]) <= int(where[-1]) < known[name]
    # The same weights off again, all at once, give the very loss that the search saw.
    with switched_off(weights, found.positions):
        assert mean_loss(model, stop) == found.losses[found.best]


def test_documents_that_rank_are_served_best():
    model = tiny_model("llama")
    weights = find_weights(model)
    rows = batches(0)
    found = purify(model, weights, rows, rows, step=0.0005, budget=0.02, patience=3)
    assert found.best > 3
    assert found.losses[found.best] < found.losses[0] - 0.1


@pytest.mark.parametrize(("step", "budget"), [(0.001, 0.0035), (0.001, 0.003), (0.004, 0.0101), (0.02, 0.005)])
def test_the_budget_is_kept(step, budget):
    model = tiny_model("llama")
    weights = find_weights(model)
    total = sum(w.size for w in weights)
    off = []
    # The stopping loss plays no part: patience is endless.
    found = purify(
        model, weights, batches(0), batches(0), step=step, budget=budget, patience=999,
        on_round=lambda r, loss, share: off.append(share),
    )  # fmt: skip
    assert off
    assert max(off) <= budget
    assert sum(map(len, found.positions.values())) <= budget * total
    assert max(off) + step > budget or found.losses[-1] == 0


def test_patience_ends_the_search():
    model = tiny_model("llama")
    weights = find_weights(model)
    for patience in (1, 3):
        found = purify(model, weights, batches(0), batches(5), step=0.01, budget=0.9, patience=patience)
        assert len(found.losses) - 1 == found.best + patience


def test_nothing_is_chosen_where_nothing_hurts():
    model = tiny_model("llama")
    weights = find_weights(model)
    for weight in weights:
        weight.parameter.data.zero_()
    found = purify(model, weights, batches(0), batches(1), step=0.01, budget=0.1)
    assert (found.positions, found.best, len(found.losses)) == ({}, 0, 1)


def test_base_is_kept_when_every_round_is_worse():
    model = tiny_model("llama")
    weights = find_weights(model)
    # What helps the one hurts the other: the stopping documents ask for what the others do not.
    rank = answer_batches([((9, 10, 11), (77,))], [0], 100, "cpu")
    ids = int(model(input_ids=torch.tensor([[9, 10, 11]])).logits[0, -1].argmax())
    stop = answer_batches([((9, 10, 11), (ids,))], [0], 100, "cpu")
    found = purify(model, weights, rank, stop, step=0.001, budget=0.05, patience=2)
    assert found.best == 0
    assert found.positions == {}
    assert len(found.losses) == 3


def test_broken_numbers_leave_the_model_as_it_was():
    model = tiny_model("llama")
    weights = find_weights(model)
    good, rows = batches(0), batches(1)
    bad = answer_batches([((5, 6), (7,))], [0], 100, "cpu")
    model.model.embed_tokens.weight.data[5] = math.nan
    assert all(5 not in b.ids for b in [*good, *rows])
    before = bits(model)
    for gradient, stop in ((bad, rows), (good, bad)):
        with pytest.raises(NumericError, match="loss"):
            purify(model, weights, gradient, stop)
        assert unchanged(model, before)
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
    calls = []

    def late(*_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        purify(model, weights, good, rows, step=0.001, patience=9, on_round=late)
    assert unchanged(model, before)


def test_a_broken_gradient_names_its_weight():
    model = tiny_model("llama")
    weights = find_weights(model)
    weights[3].parameter.register_hook(lambda g: g * math.inf)
    with pytest.raises(NumericError, match="gradient"):
        purify(model, weights, batches(0), batches(1))


@pytest.mark.parametrize("missing", ["gradient", "stop"])
def test_no_documents(missing):
    model = tiny_model("llama")
    with pytest.raises(DataError, match="0"):
        purify(
            model,
            find_weights(model),
            [] if missing == "gradient" else batches(0),
            [] if missing == "stop" else batches(0),
        )


def test_parts_share_a_round_and_a_step():
    model = tiny_model("llama")
    weights = find_weights(model)
    total = sum(w.size for w in weights)
    rows = [*batches(0), *batches(1), *batches(2), *batches(3)]
    tokens = sum(b.answer_tokens for b in rows)
    assert split_batches(rows, tokens) == [rows]
    halves = split_batches(rows, tokens // 2)
    assert sorted(map(id, halves[0] + halves[1])) == sorted(map(id, rows))
    shares: list[float] = []
    common = {"step": 0.004, "budget": 0.004, "on_round": lambda number, loss, off: shares.append(off)}
    whole = purify(model, weights, rows, batches(9), part_tokens=tokens, **common)
    parts = purify(model, weights, rows, batches(9), part_tokens=tokens // 2, **common)
    assert shares == [pytest.approx(0.004, abs=2 / total)] * 2
    # The first half of a cut in two is the strongest of its own part, at the untouched model.
    first = strongest(signed_scores_of(model, weights, halves[0]), round(0.002 * total))
    if parts.best:
        found = {w.name: set(p.tolist()) for w, p in zip(weights, first, strict=True)}
        assert all(found[name] <= set(parts.positions.get(name, torch.empty(0)).tolist()) for name in found)
    assert len(whole.losses) == len(parts.losses) == 2


def signed_scores_of(model, weights, rows):
    for weight in weights:
        weight.parameter.requires_grad_(True)
    return signed_scores(model, weights, rows)
