"""Gradients tensor by tensor: equal to autograd's, gone at once, the strongest products, and checkpointing."""

import pytest
import torch

from freemoe.domain_experts.purify.batches import mean_loss
from freemoe.domain_experts.purify.gradients import SaliencyTopK, backward, gradients_to, noise_weights
from freemoe.models.spec import family_of, find_layers
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.domain_experts.purify.test_greedy import LAYOUTS, batches, with_odd_flags
from tests.domain_experts.slow_learning import masked_gradients
from tests.masks import indices_of
from tests.tiny import CASES, model_and_weights, tiny_model


def fast_gradients(model, weights, rows, checkpointing=False):
    sums = {w.name: torch.zeros(w.size) for w in weights}

    def take(weight, gradient):
        assert gradient.shape == weight.shape
        assert all(w.parameter.grad is None for w in weights)
        sums[weight.name] += gradient.reshape(-1)

    with gradients_to(model, weights, take, checkpointing=checkpointing):
        loss = backward(model, rows)
    return list(sums.values()), loss


def layer_runs(model, monkeypatch):
    """A list that grows with every run of one of the model's layers."""
    layer, runs = type(find_layers(model, family_of(model))[1][0]), []
    inner = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *given, **options: runs.append(1) or inner(*given, **options))
    return runs


def leading(model, weights, rows, *which):
    """The mask and the promise of the weights that lead by their saliency less their toll."""
    leaders = SaliencyTopK(weights, *which)
    with gradients_to(model, weights, leaders.add_gradient, checkpointing=False):
        backward(model, rows)
    return leaders.select_weights()


@pytest.mark.parametrize("case", LAYOUTS)
def test_gradients_equal_autograd(case):
    model, weights = model_and_weights(case)
    rows = batches(0)
    expected = masked_gradients(model, weights, {}, rows)
    found, told = fast_gradients(model, weights, rows)
    assert told == pytest.approx(mean_loss(model, rows), rel=1e-5)
    for weight, a, b in zip(weights, found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6, msg=weight.name)


def test_flags_gradients_and_hooks_come_back():
    model, weights = model_and_weights("llama")
    untouched = with_odd_flags(model)
    taken = []

    def broken(weight, gradient):
        taken.append(weight.name)
        if len(taken) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), gradients_to(model, weights[:3], broken, checkpointing=True):
        backward(model, batches(0))
    assert untouched()
    for p in model.parameters():
        p.requires_grad_(True)
    backward(model, batches(0))
    assert len(taken) == 2
    assert weights[0].parameter.grad is not None


@pytest.mark.parametrize("case", sorted(CASES))
def test_checkpointing_changes_nothing(case, monkeypatch):
    model, weights = model_and_weights(case)
    rows, runs = batches(0, count=4), layer_runs(model, monkeypatch)
    plain, loss = fast_gradients(model, weights, rows)
    once = len(runs)
    again, same = fast_gradients(model, weights, rows, checkpointing=True)
    # Every layer ran once more: in the backward pass.
    assert len(runs) == 3 * once
    assert loss == same
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("count", [1, 30, 300])
def test_noise_weights_equal_ranking_everything(case, count):
    model = tiny_model(case)
    weights, rows = find_weights(model), batches(0)
    assert len(rows) > 1
    generator = torch.Generator().manual_seed(0)
    tolls = {w.name: 1e-3 * torch.rand(w.shape, generator=generator) for w in weights}
    gradients, _ = fast_gradients(model, weights, rows)
    plain = [w.canonical_view().reshape(-1) * g for w, g in zip(weights, gradients, strict=True)]
    paid = [score - tolls[w.name].flatten() for w, score in zip(weights, plain, strict=True)]
    for toll, scores in ((None, plain), (lambda w: tolls[w.name], paid)):
        line = torch.cat(scores).sort(descending=True).values[count - 1]
        mask, gain = leading(model, weights, rows, count, 1e9, toll)
        found = indices_of(mask)
        assert mask.count == count
        for weight, score in zip(weights, scores, strict=True):
            where = found.get(weight.name, torch.empty(0, dtype=torch.long))
            assert (where[1:] > where[:-1]).all()
            # The sums are taken in another order, so that a score at the line may fall on either side of it.
            assert (score[where] >= line - 1e-6).all()
            assert set((score > line + 1e-6).nonzero().flatten().tolist()) <= set(where.tolist())
        # What they promise is what they gain less what they pay.
        assert gain == pytest.approx(sum(float(score[score >= line].sum()) for score in scores), rel=1e-4)
    # Too high a toll for all leaves nothing.
    assert leading(model, weights, rows, count, 1e9, lambda w: tolls[w.name] + 1e3) == ({}, 0)


def test_leaders_of_a_share_still_hold_the_strongest():
    model, weights = model_and_weights("llama", hidden_size=64, intermediate_size=96)
    rows = batches(0, count=40, budget=100)
    total = sum(w.size for w in weights)
    assert len(rows) > 1
    assert max(w.size for w in weights) > 4 * 1024
    exact, close = (noise_weights(model, weights, rows, total // 10, spread=spread)[0] for spread in (10, 2))
    assert exact.count == close.count == total // 10
    assert exact.difference(close).count < 0.2 * (total // 10)


def test_a_weight_that_is_off_is_not_named_again():
    model, weights = model_and_weights("llama")
    first = noise_weights(model, weights, batches(0), 50, spread=10)[0]
    with switched_off(weights, first):
        second = noise_weights(model, weights, batches(0), 50, spread=10)[0]
    assert first.difference(second).is_equal(first)
