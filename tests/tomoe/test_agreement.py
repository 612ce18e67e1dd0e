"""An export that is right agrees layer by layer, near-ties and number formats included; one that is wrong does not."""

import itertools

import pytest
import torch

from freemoe.core.errors import NumericError
from freemoe.models.sublayers import CONVERTIBLE, find_sublayers
from freemoe.tomoe.export import build_converted_model
from freemoe.tomoe.measure.agreement import layer_inputs, mismatch_shares, require_agreement
from freemoe.tomoe.structures.masked import apply_structure
from tests.tiny import tiny_model
from tests.tomoe.random_structures import random_structure

IDS = torch.arange(3, 67)[None]


def pair(dtype=torch.float32, mode="shared", family="llama"):
    """A converted model, and what the masks on its dense one give."""
    model = tiny_model(family).to(dtype)
    structure = random_structure(model)
    paths = [layer.path for layer in find_sublayers(model)]
    new = build_converted_model(model, structure, mode)
    with apply_structure(model, structure):
        inputs, logits = layer_inputs(model, paths, IDS)
    return model, new, paths, inputs, logits


@pytest.mark.parametrize(
    ("dtype", "mode", "family"),
    [
        *itertools.product(
            (torch.float32, torch.bfloat16, torch.float16), ("shared", "materialised", "pseudo"), ["llama"]
        ),
        *((torch.float32, "shared", family) for family in CONVERTIBLE),
    ],
)
def test_a_right_export_agrees_for_every_token(dtype, mode, family):
    _, new, paths, inputs, logits = pair(dtype, mode, family)
    shares = mismatch_shares(new, paths, IDS, inputs, logits)
    assert len(shares) == len(paths)
    assert max(shares) <= (0 if dtype == torch.float32 else 0.02)
    require_agreement(shares, IDS.numel())


def flipped(new, layer, tokens):
    """Let a layer's router choose another expert for some tokens."""
    block = new.model.layers[layer].mlp
    own = block.mixture

    def other(x, expert):
        expert = expert.clone()
        expert[tokens] = (expert[tokens] + 1) % len(block.experts)
        return own(x, expert)

    block.mixture = other


def test_one_near_tie_is_one_token_of_one_layer_and_many_are_a_mistake():
    _, new, paths, inputs, logits = pair()
    flipped(new, 0, [5])
    shares = mismatch_shares(new, paths, IDS, inputs, logits)
    # As a whole the two would differ at every token behind it.
    assert shares == [pytest.approx(1 / 64), *[0.0] * (len(paths) - 1)]
    require_agreement(shares, 64)
    flipped(new, 1, [5, 9, 30])
    with pytest.raises(NumericError, match=r"Layer 1 of the exported model.*4\.7% of 64 tokens"):
        require_agreement(mismatch_shares(new, paths, IDS, inputs, logits), 64)


@pytest.mark.parametrize("name", ["down", "up", "experts"])
def test_a_wrong_matrix_is_found(name):
    _, new, paths, inputs, logits = pair()
    wrong = getattr(new.model.layers[0].mlp, name)
    wrong.data.copy_(wrong.data.roll(1, -2) if name != "experts" else wrong.data.roll(1, 0))
    with pytest.raises(NumericError, match="Layer 0"):
        require_agreement(mismatch_shares(new, paths, IDS, inputs, logits), 64)


def test_nan_is_no_agreement():
    _, new, paths, inputs, logits = pair()
    new.model.layers[0].mlp.down.data[:] = float("nan")
    assert mismatch_shares(new, paths, IDS, inputs, logits)[0] == 1.0
