"""Gradient passes in bfloat16: close to fp32's, given in the weights' own dtype, chosen where they are measured faster."""

from __future__ import annotations

import pytest
import torch

from freemoe import runs
from freemoe.domain_experts import precision
from freemoe.domain_experts.batches import answer_loss
from freemoe.domain_experts.gradients import backward, gradients_to
from freemoe.domain_experts.precision import compute_dtype, speedup
from freemoe.families.weights import find_weights
from tests.domain_experts.test_saliency import LAYOUTS, batches, bits, unchanged
from tests.tiny import tiny_model


def gradients(model, weights, compute):
    sums = {}

    def take(weight, gradient):
        assert gradient.dtype == weight.parameter.dtype
        sums[weight.name] = sums.get(weight.name, 0) + gradient.reshape(-1).clone()

    with gradients_to(model, weights, take, checkpointing=False):
        loss = backward(model, batches(0), compute)
    return torch.cat([sums[w.name] for w in weights]), loss


@pytest.mark.parametrize("case", [*LAYOUTS, "gemma2", "phi"])
def test_gradients_in_bfloat16_point_where_those_in_fp32_do(case):
    model = tiny_model(case)
    weights = find_weights(model)
    before = bits(model)
    exact, loss = gradients(model, weights, None)
    close, near = gradients(model, weights, torch.bfloat16)
    assert near == pytest.approx(loss, rel=0.01)
    assert near != loss
    assert 0.99 < float(torch.cosine_similarity(close, exact, 0)) < 1
    assert 0.98 < float(close.norm() / exact.norm()) < 1.02
    assert unchanged(model, before)


def test_without_a_wish_the_loss_is_the_models_own():
    model = tiny_model("llama")
    (first, *_) = batches(0)
    whole = answer_loss(model, first)
    assert not torch.is_autocast_enabled("cpu")
    half = answer_loss(model, first, torch.bfloat16)
    assert not torch.is_autocast_enabled("cpu")
    assert whole.dtype == half.dtype == torch.float32
    assert float(answer_loss(model, first).detach()) == float(whole.detach()) != float(half.detach())


@pytest.mark.parametrize(("faster", "expected"), [(0.4, None), (1.2, None), (1.3, torch.bfloat16)])
def test_what_is_clearly_faster_is_taken(faster, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(precision, "speedup", lambda *args: asked.append(args) or faster)
    model = tiny_model("llama")
    # Small matrices are never measured.
    assert compute_dtype("auto", model) is None
    assert not asked
    monkeypatch.setattr(precision, "_SMALLEST", 1)
    assert compute_dtype("auto", model) is expected
    # Gate and up are as many as queries and outputs, and larger.
    assert asked == [(torch.device("cpu"), 48, 32)]
    assert compute_dtype("own", model) is None
    assert compute_dtype("bfloat16", model) is torch.bfloat16
    assert len(asked) == 1


@pytest.mark.parametrize("wish", ["auto", "own", "bfloat16"])
def test_a_base_in_half_precision_keeps_its_own(wish, monkeypatch):
    monkeypatch.setattr(precision, "speedup", lambda *args: 9.0)
    assert compute_dtype(wish, tiny_model("llama").to(torch.bfloat16)) is None


def test_a_measurement_is_kept_and_recorded():
    speedup.cache_clear()
    runs._MEASURED.clear()
    assert "measured" not in runs.environment()
    before = torch.get_num_threads()
    found = speedup(torch.device("cpu"), 64, 32)
    assert found > 0
    assert torch.get_num_threads() == before
    assert speedup(torch.device("cpu"), 64, 32) == found
    ((name, value),) = runs.environment()["measured"].items()
    assert name == "bfloat16 against float32, 64 x 32 on cpu"
    assert value == round(found, 3)
    runs._MEASURED.clear()
