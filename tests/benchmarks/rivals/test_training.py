"""LoRA and full tuning: they start at the base, train what they say, keep their best, and touch nothing else."""

import pytest
import torch

from benchmarks.rivals.rival import Schedule
from benchmarks.rivals.training import tune, with_lora
from freemoe.domain_experts.purify.batches import answer_batches, answer_loss, mean_loss
from freemoe.models.weights import find_weights
from tests.tiny import model_and_weights, tiny_model

SCHEDULE = Schedule(steps=6, step_tokens=8, every=2, patience=2)


@pytest.fixture
def batches():
    rows = [((3, 4, 5, 6), (5, 6, 7)), ((8, 9, 3), (3, 4)), ((4, 4, 5, 9), (5, 9, 2)), ((7, 3), (3, 8))]
    return answer_batches(rows, [0] * len(rows), 64, "cpu")


def test_full_tuning_changes_the_linears_alone_and_keeps_its_best(batches):
    model, weights = model_and_weights("llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = tune(model, [w.parameter for w in weights], batches, batches, 1e-2, SCHEDULE, 0)
    assert len(losses) == 1 + SCHEDULE.steps // SCHEDULE.every
    assert losses[0] > min(losses) == pytest.approx(mean_loss(model, batches))
    changed = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert changed == {w.name for w in weights}


def test_it_stops_when_the_stopping_loss_does_and_goes_back_to_its_best(batches):
    model = tiny_model("llama")
    # The same contexts with other answers: what is learned makes these less likely.
    others = answer_batches([((3, 4, 5, 6), (9, 2, 3)), ((8, 9, 3), (7, 6))], [0, 0], 64, "cpu")
    losses = tune(model, [w.parameter for w in find_weights(model)], batches, others, 1e-2, Schedule(50, 8, 1, 3), 0)
    assert len(losses) - 1 - losses.index(min(losses)) == 3
    assert len(losses) < 51
    assert mean_loss(model, others) == pytest.approx(min(losses))


def test_one_step_is_one_step_of_adam_on_the_mean_loss(batches):
    model, slow = tiny_model("llama"), tiny_model("llama")
    everything = Schedule(steps=1, step_tokens=10_000, every=1, patience=9)
    tune(model, [w.parameter for w in find_weights(model)], batches, batches, 1e-3, everything, 0)
    parameters = [w.parameter for w in find_weights(slow)]
    tokens = sum(b.answer_tokens for b in batches)
    (sum(answer_loss(slow, b) for b in batches) / tokens).backward()
    # Adam's first step is the sign of the gradient times the rate, but for its epsilon.
    for weight, p in zip(find_weights(model), parameters, strict=True):
        wanted = p.detach() - 1e-3 * p.grad / (p.grad.abs() + 1e-8)
        torch.testing.assert_close(weight.parameter.detach(), wanted, atol=2e-6, rtol=0)


def test_lora_starts_as_the_base_and_counts_its_numbers(batches):
    model, weights = model_and_weights("llama")
    begun = mean_loss(model, batches)
    wanted = sum(2 * (w.num_rows + w.num_columns) for w in weights)
    tuned, parameters = with_lora(model, weights, 2, 0)
    assert sum(p.numel() for p in parameters) == wanted
    assert mean_loss(tuned, batches) == begun
    frozen = {n: p.detach().clone() for n, p in tuned.named_parameters() if "lora_" not in n}
    losses = tune(tuned, parameters, batches, batches, 5e-2, SCHEDULE, 0)
    assert min(losses) < begun
    assert all(torch.equal(frozen[n], p) for n, p in tuned.named_parameters() if n in frozen)
    merged = tuned.merge_and_unload()
    assert mean_loss(merged, batches) == pytest.approx(min(losses), abs=1e-4)
