"""A base with planted super weights: what first order alone does to it, and that purification leaves them alone.

One MLP neuron of the first layer is massive, and another one is its copy. Of the two, one writes into the residual stream
through a huge weight and the other takes it away again, so that the base works; but each of the two weights alone, switched
off, leaves the other's share standing. Their w * dL/dw is large, and for one of the two positive.
"""

from pathlib import Path

import pytest
import torch

from freemoe.domain_experts.batches import answer_batches, mean_loss
from freemoe.domain_experts.curvature import measure_curvature, super_weights
from freemoe.domain_experts.gradients import noise_weights
from freemoe.domain_experts.learned import learn
from freemoe.domain_experts.saliency import purify
from freemoe.domain_experts.switching import switched_off
from freemoe.families.loading import BUNDLED, load_base
from freemoe.families.weights import find_weights

ROW, MASSIVE, COPY = 5, 3, 11
HUGE = 300.0


@pytest.fixture(scope="module")
def planted():
    """The bundled base with two planted weights, its weights, and two disjoint parts of a text far from its home."""
    model, tokenizer = load_base(BUNDLED, None, "float32", "cpu")
    weights = find_weights(model)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight[MASSIVE] *= 10
        mlp.down_proj.weight[:, MASSIVE] /= 10
        for matrix in (mlp.gate_proj.weight, mlp.up_proj.weight):
            matrix[COPY] = matrix[MASSIVE]
        mlp.down_proj.weight[:, COPY] = 0
        mlp.down_proj.weight[ROW, COPY] = HUGE
        mlp.down_proj.weight[ROW, MASSIVE] -= HUGE
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: 64 * 97]
    blocks = [tuple(ids[i : i + 65]) for i in range(0, len(ids) - 64, 64)]
    parts = []
    for first in (0, 1):
        rows = [(b[:-1], b[1:]) for b in blocks[first::2]]
        parts.append(answer_batches(rows, [0] * len(rows), 1024, "cpu"))
    return model, weights, parts


def places(weights):
    """The planted weight that looks as if it hurt, and both."""
    down = next(w for w in weights if w.layer == 0 and "down_proj" in w.name)
    return down.name, {ROW * down.columns + MASSIVE, ROW * down.columns + COPY}


def test_first_order_alone_destroys_it(planted):
    model, weights, (gradient, stop) = planted
    name, super_ones = places(weights)
    base = mean_loss(model, stop)
    chosen = noise_weights(model, weights, gradient, 20, spread=256)
    assert super_ones & set(chosen[name].tolist())
    with switched_off(weights, chosen):
        assert mean_loss(model, stop) > base + 2
    # Even alone.
    worst = super_ones & set(noise_weights(model, weights, gradient, 1, spread=256)[name].tolist())
    with switched_off(weights, {name: torch.tensor(sorted(worst))}):
        assert worst
        assert mean_loss(model, stop) > base + 2


def test_they_are_shown(planted):
    model, weights, (gradient, _) = planted
    name, super_ones = places(weights)
    found = super_weights(measure_curvature(model, weights, gradient), weights, 2)
    columns = next(w for w in weights if w.name == name).columns
    assert {(f.weight, f.row * columns + f.column) for f in found} == {(name, place) for place in super_ones}


@pytest.mark.parametrize("method", ["greedy", "learned"])
def test_purification_gains_and_leaves_them_alone(planted, method):
    model, weights, (gradient, stop) = planted
    name, super_ones = places(weights)
    if method == "greedy":
        found = purify(model, weights, gradient, stop, step=1e-3, budget=0.01, patience=3)
    else:
        found = learn(model, weights, gradient, stop, budget=0.01, steps=24)
    assert not super_ones & set(found.positions.get(name, torch.empty(0)).tolist())
    assert found.losses[found.best] < found.losses[0] - 0.05
    # No round on the way was a catastrophe either.
    assert max(found.losses) < found.losses[0] + 0.5
