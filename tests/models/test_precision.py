"""Purification in bfloat16: gradients close to fp32's, the model's own weights back bit by bit, chosen where it is faster."""

import pytest
import torch

from freemoe.core import environment
from freemoe.core.errors import NumericError
from freemoe.domain_experts.purify.batches import answer_loss
from freemoe.domain_experts.purify.gradients import backward, gradients_to
from freemoe.models import precision
from freemoe.models.precision import bfloat16_speedup, compute_dtype, held_in
from freemoe.models.switching import switched_off
from tests.domain_experts.purify.test_greedy import LAYOUTS, batches, bits, unchanged
from tests.masks import mask_of
from tests.tiny import model_and_weights, tiny_model


def gradients(model, weights, compute):
    sums = {}

    def take(weight, gradient):
        assert gradient.dtype == weight.parameter.dtype == (compute or torch.float32)
        sums[weight.name] = sums.get(weight.name, 0) + gradient.reshape(-1).float()

    with held_in(model, compute), gradients_to(model, weights, take, checkpointing=False):
        loss = backward(model, batches(0))
    return torch.cat([sums[w.name] for w in weights]), loss


@pytest.mark.parametrize("case", [*LAYOUTS, "gemma2", "phi"])
def test_gradients_in_bfloat16_point_where_those_in_fp32_do(case):
    model, weights = model_and_weights(case)
    before = bits(model)
    exact, loss = gradients(model, weights, None)
    close, near = gradients(model, weights, torch.bfloat16)
    assert near == pytest.approx(loss, rel=0.01)
    assert near != loss
    assert 0.99 < float(torch.cosine_similarity(close, exact, 0)) < 1
    assert 0.98 < float(close.norm() / exact.norm()) < 1.02
    assert unchanged(model, before)


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_whatever_happens_inside_the_models_own_weights_come_back(case):
    model = tiny_model(case)
    (first, *_) = batches(0)
    before, buffers = bits(model), {n: b.dtype for n, b in model.named_buffers()}
    kept = next(model.parameters())
    kept.requires_grad_(True)
    answer_loss(model, first).backward()
    gradient, whole = kept.grad, float(answer_loss(model, first).detach())

    def inside():
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {n: b.dtype for n, b in model.named_buffers()} == buffers
        half = answer_loss(model, first)
        assert half.dtype == torch.float32
        assert float(half.detach()) != whole
        half.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        raise NumericError("inside")

    with pytest.raises(NumericError), held_in(model, torch.bfloat16):
        inside()
    assert unchanged(model, before)
    assert kept.grad is gradient
    assert float(answer_loss(model, first).detach()) == whole
    with held_in(model, None):
        assert unchanged(model, before)


def test_switches_off_around_it_stay_off_inside_and_come_back(llama, weights):
    before, first = bits(llama), weights[0]
    outer, inner = (torch.arange(start, first.size, 3) for start in (0, 1))
    with switched_off(weights, mask_of({first.name: outer}, weights)):
        with held_in(llama, torch.bfloat16), switched_off(weights, mask_of({first.name: inner}, weights)):
            off = first.canonical_view().reshape(-1) == 0
            assert off[outer].all()
            assert off[inner].all()
        assert not (first.canonical_view().reshape(-1)[inner] == 0).any()
    assert unchanged(llama, before)


@pytest.mark.parametrize(("faster", "expected"), [(0.4, None), (1.2, None), (1.3, torch.bfloat16)])
def test_what_is_clearly_faster_is_taken(llama, faster, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(precision, "bfloat16_speedup", lambda *args: asked.append(args) or faster)
    # Small matrices are never measured.
    assert compute_dtype("auto", llama) is None
    assert not asked
    monkeypatch.setattr(precision, "_SMALLEST", 1)
    wishes = ("auto", "own", "bfloat16")
    assert [compute_dtype(wish, llama) for wish in wishes] == [expected, None, torch.bfloat16]
    # Gate and up are as many as queries and outputs, and larger.
    assert asked == [(torch.device("cpu"), 48, 32)]
    # A base in half precision keeps its own.
    assert [compute_dtype(wish, llama.to(torch.bfloat16)) for wish in wishes] == [None] * 3
    assert len(asked) == 1


def test_a_measurement_is_kept_and_recorded(monkeypatch):
    bfloat16_speedup.cache_clear()
    monkeypatch.setattr(environment, "_MEASURED", {})
    assert "measured" not in environment.describe_environment()
    before = torch.get_num_threads()
    found = bfloat16_speedup(torch.device("cpu"), 64, 32)
    assert found > 0
    assert torch.get_num_threads() == before
    assert bfloat16_speedup(torch.device("cpu"), 64, 32) == found
    measured = {"bfloat16 against float32, 64 x 32 on cpu": round(found, 3)}
    assert environment.describe_environment()["measured"] == measured
