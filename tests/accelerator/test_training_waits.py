"""How often the host waits for its device in a step of each training: a step must not grow slower with the weights that it has."""

import random
from contextlib import contextmanager

import pytest
import torch

from freemoe.domain_experts.purify import learned
from freemoe.domain_experts.purify.batches import answer_batches
from freemoe.domain_experts.purify.greedy import PurifyTask
from freemoe.domain_experts.rank.calibrate import calibrate
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.hookmoe.hooks import training
from freemoe.hookmoe.hooks.hook import new_hooks
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.models.weights import find_weights
from freemoe.tomoe.gates.train import GateTrainer
from tests.hookmoe.hooks.test_training import material
from tests.tiny import tiny_model
from tests.tomoe.gates.test_train import recipe, trainer

pytestmark = pytest.mark.usefixtures("pretend_accelerator")
DEVICE = "pretend"


def answers(number, seed):
    """Random prompts with random answers."""
    draw = random.Random(seed)
    rows = [(tuple(draw.choices(range(3, 250), k=20)), tuple(draw.choices(range(3, 250), k=8))) for _ in range(number)]
    return answer_batches(rows, [0] * number, 400, DEVICE)


@contextmanager
def each_call(module, owner, name):
    """While open, what the host waits for in each call of a method, in a list."""
    seen, inner = [], getattr(owner, name)

    def counted(*args, **kwargs):
        with module.waits() as count:
            found = inner(*args, **kwargs)
        seen.append(count)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        yield seen


# Sums of matrices with a side of more than 128 are kept in few directions, others whole.
LARGE = {"hidden_size": 144, "intermediate_size": 160, "num_key_value_heads": 4}


@pytest.mark.parametrize("shape", [{}, LARGE, {"num_hidden_layers": 4}], ids=["small", "large", "deep"])
def test_a_step_of_learned_switches_waits_for_less_than_one_thing_a_weight(shape, pretend_accelerator):
    model = tiny_model("llama", **shape).to(DEVICE)
    weights = find_weights(model)
    with each_call(pretend_accelerator, learned._SwitchTraining, "_train_step") as seen:
        task = PurifyTask(model, weights, answers(50, 0), answers(10, 1))
        learned.learn_switches(task, SaliencySection(budget=0.02, steps=8, step_tokens=40, every=8))
    # The first step knows no line to look for the highest scores at, the last one looks at the stopping documents.
    for count in seen[2:-1]:
        assert count.total <= 11 < len(weights), count


@pytest.mark.parametrize(
    "values", [{}, {"profile": "paper"}, {"train": {"loss": "lm"}}], ids=["default", "paper", "lm"]
)
def test_a_step_of_gates(values, pretend_accelerator):
    own = trainer(recipe(**values), device=DEVICE)
    with each_call(pretend_accelerator, GateTrainer, "_train_step") as seen:
        own.train_until(4)
    for count in seen:
        assert count.total <= 4, count


@pytest.mark.parametrize("loss", training.LOSSES)
def test_a_step_of_hooks(loss, pretend_accelerator):
    model = tiny_model("mixtral", num_hidden_layers=3).to(DEVICE)
    # What the family's own experts wait for is not ours.
    model.set_experts_implementation("batched_mm")
    hooks = new_hooks(model, {1: 8, 2: 8}, "block", "pre")
    with each_call(pretend_accelerator, training, "optimizer_step") as seen:
        training.train_compensation(
            model, LayerPlan((1, 1, 1)), hooks, material(model), training.TrainingSchedule(loss, 4, 3, 1e-2, 4)
        )
    assert len(seen) == 4
    for count in seen:
        assert count.total <= 2, count


@pytest.mark.parametrize(
    ("case", "experts", "each"), [("llama", {}, 2), ("mixtral", {"num_local_experts": 6}, 2 + 2 * 2)]
)
def test_a_batch_of_calibration(case, experts, each, pretend_accelerator):
    model = tiny_model(case, **experts).to(DEVICE)
    if experts:
        model.set_experts_implementation("batched_mm")
    batches = [(b.ids, b.mask, torch.arange(len(b.ids)) % 3) for b in answers(50, 0)]
    weights = find_weights(model)
    with pretend_accelerator.waits() as count:
        calibrate(model, weights, batches, 3)
    # One for what it found, one for the family's look at the mask, and two for each router's choice.
    assert count.total <= each * len(batches), count
