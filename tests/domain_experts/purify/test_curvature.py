"""The curvature: equal to a slow one, blind to padding, and what is read off it."""

from functools import partial

import pytest
import torch

from freemoe.domain_experts.purify.batches import AnswerBatch, mean_loss
from freemoe.domain_experts.purify.curvature import Curvature, forecast_loss, measure_curvature, super_weights
from freemoe.domain_experts.purify.gradients import noise_weights
from freemoe.models.mask import Mask
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.domain_experts.purify.test_greedy import LAYOUTS, batches, bits, unchanged
from tests.domain_experts.slow_learning import masked_gradients
from tests.masks import indices_of
from tests.tiny import model_and_weights, tiny_model


@pytest.mark.parametrize("case", LAYOUTS)
def test_outputs_equal_their_definition(case):
    model, weights = model_and_weights(case)
    rows, before = batches(0, 30), bits(model)
    curvature = measure_curvature(model, weights, rows)
    assert unchanged(model, before)
    answers = sum(b.answer_tokens for b in rows)
    slow = [torch.zeros(w.size) for w in weights]
    for batch in rows:
        for sums, gradient in zip(slow, masked_gradients(model, weights, {}, [batch]), strict=True):
            # n of a batch times its mean gradient's square; over all of the batches, each with its share of the tokens.
            sums += batch.answer_tokens * gradient.square() * batch.answer_tokens / answers
    for weight, squares in zip(weights, slow, strict=True):
        inputs = curvature.inputs[weight.name]
        assert inputs.shape == (weight.num_experts, weight.num_columns)
        over = torch.where(inputs > 0, 1 / inputs, 0.0)[:, None, :]
        seen = (inputs > 0).sum(-1, keepdim=True).clamp(min=1)
        expected = (squares.reshape(weight.shape) * over).sum(-1) / seen
        torch.testing.assert_close(curvature.outputs[weight.name], expected, rtol=2e-3, atol=1e-7, msg=weight.name)
        h = curvature.weight_curvature(weight)
        assert h.shape == weight.shape
        w = weight.canonical_view()
        torch.testing.assert_close(curvature.second_order_cost(weight), w**2 * h / 2)
        torch.testing.assert_close(curvature.fisher_scale(weight), w.abs() * h.sqrt())


def test_inputs_are_the_means_over_real_tokens():
    model, weights = model_and_weights("llama")
    rows = batches(0, 60)
    sums = {w.name: torch.zeros(w.num_columns) for w in weights}

    def add_inputs(name, module, given):
        sums[name] += given[0].detach().flatten(0, -2).square().sum(0)

    inputs = measure_curvature(model, weights, rows).inputs
    for name in sums:
        model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(partial(add_inputs, name))
    for batch in batches(0, 60, budget=1):  # the same documents one by one, without padding
        model(input_ids=batch.ids)
    tokens = sum(int(b.mask.sum()) for b in rows)
    for name, found in inputs.items():
        torch.testing.assert_close(found[0], sums[name] / tokens, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_padding_does_not_count(case):
    model, weights = model_and_weights(case)
    (batch,) = batches(0, 6, budget=400)
    assert not batch.mask.all()
    fields = zip((batch.ids, batch.mask, batch.targets), (9, 0, -100), strict=True)
    wide = AnswerBatch(*(torch.nn.functional.pad(field, (0, 5), value=value) for field, value in fields), batch.labels)
    plain, padded = (measure_curvature(model, weights, [b]) for b in (batch, wide))
    for weight in weights:
        torch.testing.assert_close(plain.inputs[weight.name], padded.inputs[weight.name], rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(plain.outputs[weight.name], padded.outputs[weight.name], rtol=1e-3, atol=1e-9)


def test_an_expert_that_saw_nothing_disturbs_nothing():
    model = tiny_model("mixtral")
    weights = [w for w in find_weights(model) if w.is_fused]
    curvature = measure_curvature(model, weights, batches(0, budget=1)[:1])
    idle = [(w, e) for w in weights for e in range(w.num_experts) if not curvature.inputs[w.name][e].any()]
    assert idle
    for weight, expert in idle:
        assert not curvature.weight_curvature(weight)[expert].any()
    assert all(torch.isfinite(v).all() for v in curvature.outputs.values())


def test_the_small_cost_is_that_of_the_tenth_part_of_weights_that_cost_anything():
    weights = find_weights(tiny_model("llama"))
    generator = torch.Generator().manual_seed(0)
    curvature = Curvature(
        {w.name: torch.rand(w.num_experts, w.num_columns, generator=generator) for w in weights},
        {w.name: torch.rand(w.num_experts, w.num_rows, generator=generator) for w in weights},
    )
    # What costs nothing, as a neuron that is off, leaves the unit as it is.
    for off in (0, 1):
        for weight in weights:
            weight.parameter.data[: off * weight.parameter.shape[0] // 4] = 0
        costs = torch.cat([curvature.fisher_scale(w).flatten() for w in weights])
        costs = costs[costs > 0]
        assert float((costs < curvature.small_cost(weights)).float().mean()) == pytest.approx(0.1, abs=1e-4)
    nothing = Curvature({n: 0 * v for n, v in curvature.inputs.items()}, curvature.outputs)
    assert nothing.small_cost(weights) == 0


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_forecast_equals_a_slow_one(case):
    model, weights = model_and_weights(case)
    before = bits(model)
    curvature = measure_curvature(model, weights, batches(0))
    off, rows = noise_weights(model, weights, batches(0), 60, spread=1e9)[0], batches(1)
    found = forecast_loss(model, weights, off, curvature, rows)
    first = disturbance = 0.0
    for weight, gradient in zip(weights, masked_gradients(model, weights, {}, rows), strict=True):
        places = indices_of(off).get(weight.name, torch.empty(0, dtype=torch.long))
        own = weight.canonical_view().reshape(-1)[places]
        first += float((own * gradient[places]).sum())
        disturbance += float((own**2 * curvature.weight_curvature(weight).reshape(-1)[places] / 2).sum())
    assert found.first_order == pytest.approx(first, rel=1e-3, abs=1e-6)
    assert found.disturbance == pytest.approx(disturbance, rel=1e-3)
    base = mean_loss(model, rows)
    with switched_off(weights, off):
        assert found.measured == pytest.approx(base - mean_loss(model, rows), abs=1e-7)
    assert unchanged(model, before)
    assert forecast_loss(model, weights, Mask(), curvature, rows) is None


@pytest.mark.parametrize("case", LAYOUTS)
def test_super_weights_are_the_largest_disturbances(case):
    model, weights = model_and_weights(case)
    if case in ("llama", "gpt2"):
        weights[-1].canonical_view()[0, 7, 2] = 40.0
    curvature = measure_curvature(model, weights, batches(0, 30))
    found = super_weights(curvature, weights, 8)
    if case in ("llama", "gpt2"):
        first = found[0]
        assert (first.weight, first.expert, first.row, first.column, first.value) == (weights[-1].name, 0, 7, 2, 40)
    slow = torch.cat([curvature.second_order_cost(w).flatten() for w in weights]).sort(descending=True).values[:8]
    assert [f.disturbance for f in found] == pytest.approx(slow.tolist())
    by_name = {w.name: w for w in weights}
    median = float(torch.cat([curvature.fisher_scale(w).flatten() for w in weights]).median())
    for f in found:
        place = f.expert, f.row, f.column
        assert f.value == float(by_name[f.weight].canonical_view()[place])
        assert f.times == pytest.approx(float(curvature.fisher_scale(by_name[f.weight])[place]) / median, rel=1e-2)
