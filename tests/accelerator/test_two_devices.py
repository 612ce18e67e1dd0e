"""A base over two devices: every tensor is made, and meets others, where its neighbours are."""

import pytest
import torch

from freemoe.models.hooks import combined_hooks, forward_pre_hook
from freemoe.models.spec import family_of, find_layers
from tests.accelerator.worlds import WORKS, World, each_family, numbers


def moved(value, device):
    if isinstance(value, dict):
        return {name: moved(part, device) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


@each_family("llama", of=["llama", "qwen3_moe"])
@pytest.mark.parametrize("work", WORKS, ids=lambda f: f.__name__)
def test_nothing_is_made_without_its_neighbours_device(work, case, pretend_accelerator):
    expected = work(World(case, "cpu"))
    world = World(case, "pretend:0")
    _, layers = find_layers(world.model, family_of(world.model))
    second = layers[len(layers) // 2 :]
    for layer in second:
        layer.to("pretend:1")
    crossings = [(layer, "pretend:1") for layer in second] + [(world.model.model.norm, "pretend:0")]
    with combined_hooks(
        *(forward_pre_hook(m, lambda _, a, k, d=d: (moved(a, d), moved(k, d)), kwargs=True) for m, d in crossings)
    ):
        found = work(world)
    # Attention is computed another way.
    assert list(numbers(found)) == pytest.approx(list(numbers(expected)), rel=1e-4, abs=1e-4)
