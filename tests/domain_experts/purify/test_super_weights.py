"""A toy with a planted super weight: what first order alone does to it, and that purification now leaves it alone."""

import pytest
import torch

from freemoe.domain_experts.purify.batches import answer_batches, mean_loss
from freemoe.domain_experts.purify.curvature import measure_curvature, super_weights
from freemoe.domain_experts.purify.gradients import noise_weights
from freemoe.domain_experts.purify.greedy import greedy_purify, removal_penalty
from freemoe.domain_experts.purify.learned import learn_switches
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.domain_experts.purify.test_gradients import leading
from tests.domain_experts.purify.test_greedy import purify
from tests.masks import indices_of
from tests.tiny import tiny_model

ROW, COLUMN = 3, 5
HUGE = 60.0


def counting(seed, step, count=24):
    """Texts that count upwards by a step, and their continuation."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for start in torch.randint(3, 60, (count,), generator=generator).tolist():
        ids = [3 + (start + step * i) % 60 for i in range(11)]
        rows.append((tuple(ids[:-1]), tuple(ids[1:])))
    return answer_batches(rows, [0] * count, 400, "cpu")


def loss_of(model, rows):
    return sum(
        torch.nn.functional.cross_entropy(model(input_ids=b.ids).logits.flatten(0, 1), b.targets.flatten())
        for b in rows
    )


@pytest.fixture(scope="module")
def planted():
    """A model that was trained around one huge weight of an early down projection, and leans on it."""
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    # The neuron that it reads gives a * silu(a) for some a, which is hardly ever negative: a massive activation.
    direction = torch.randn(mlp.gate_proj.in_features, generator=torch.Generator().manual_seed(1)) / 4
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def plant(value):
        mlp.gate_proj.weight.data[COLUMN] = direction
        mlp.up_proj.weight.data[COLUMN] = direction
        mlp.down_proj.weight.data[ROW, COLUMN] = value

    rows = counting(0, 1, 48)
    for _ in range(300):
        plant(HUGE)
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    # A little too large: by its gradient it should become smaller, and first order knows no end to that.
    plant(1.3 * HUGE)
    model.zero_grad(set_to_none=True)
    return model, find_weights(model)


def loss_without(model, weights, mask, rows):
    with switched_off(weights, mask):
        return mean_loss(model, rows)


def test_first_order_alone_destroys_it_and_the_toll_does_not(planted):
    model, weights = planted
    rows, fresh = counting(1, 1), counting(4, 1)
    base = mean_loss(model, fresh)
    chosen, promised = leading(model, weights, rows, 20, 1e9)
    # Twenty weights of ten thousands, which should gain a lot and cost a nat.
    assert promised > 0.1
    assert loss_without(model, weights, chosen, fresh) > base + 0.8
    toll = removal_penalty(measure_curvature(model, weights, rows), sum(b.answer_tokens for b in rows))
    careful = noise_weights(model, weights, rows, 20, spread=1e9, toll=toll)[0]
    assert loss_without(model, weights, careful, fresh) < base + 0.3


@pytest.mark.parametrize("text", ["home", "far"])
@pytest.mark.parametrize("way", [greedy_purify, learn_switches])
def test_purification_leaves_them_alone_and_still_gains(way, text, planted):
    model, weights = planted
    gradient, stop, fresh = (counting(seed, {"home": 1, "far": 2}[text]) for seed in (2, 3, 5))
    settings = {"step": 0.001, "patience": 3} if way is greedy_purify else {}
    found = purify(way, model, gradient, stop, budget=0.03, **settings)
    off, columns = indices_of(found.mask), {w.name: w.num_columns for w in weights}
    for large in super_weights(measure_curvature(model, weights, gradient), weights, 5):
        assert large.row * columns[large.weight] + large.column not in off.get(large.weight, ())
    base = mean_loss(model, fresh)
    if way is learn_switches:
        # On its way it never did the harm that first order alone does with far fewer weights.
        assert max(found.losses) < found.losses[0] + 0.3
    assert loss_without(model, weights, found.mask, fresh) < base + {"home": 0.05, "far": -1}[text]
