"""A dense model split into a mixture: the same model while all experts run, and nothing but routers learns."""

import pytest
import torch

from benchmarks.real_llm.methods.splitting import Split, divide, evenly, mixture, train_routers
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.checkpoints.saving import save_checkpoint
from freemoe.text.blocks import PackedBlocks
from tests.tiny import tiny_model

EXPERTS, LENGTH = 2, 24


@pytest.fixture
def text():
    ids = torch.randint(3, 280, (12, LENGTH), generator=torch.Generator().manual_seed(0))
    return PackedBlocks(ids, torch.arange(LENGTH).expand(12, LENGTH).clone())


@pytest.fixture
def dense():
    return tiny_model("llama")


def test_with_all_experts_and_even_weights_it_is_the_dense_model(dense, text):
    splits = [Split(s.shared, s.neurons, torch.zeros_like(s.router)) for s in divide(dense, text, EXPERTS, 0)]
    with torch.no_grad():
        torch.testing.assert_close(mixture(dense, splits, EXPERTS)(text.ids).logits, dense(text.ids).logits)


def test_every_neuron_is_one_experts_and_tokens_find_their_clusters(dense, text):
    splits = divide(dense, text, EXPERTS, 0)
    for split in splits:
        every = torch.cat([split.shared, split.neurons.flatten()]).sort().values
        assert every.tolist() == list(range(dense.config.intermediate_size))
    model = mixture(dense, splits, 1)
    seen = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: seen.append(output[2]))
    with torch.no_grad():
        model(text.ids)
    assert seen[0].unique().tolist() == list(range(EXPERTS))


def test_neurons_go_where_they_are_wanted_most_until_an_expert_is_full():
    wanted = torch.tensor([[9.0, 8.0, 7.0, 1.0], [1.0, 2.0, 6.0, 0.5]])
    assert evenly(wanted, 2).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="4 neurons cannot be divided evenly among 2 experts"):
        evenly(wanted, 3)


def test_training_moves_routers_alone_and_towards_the_dense_model(dense, text):
    splits = divide(dense, text, EXPERTS, 0)
    # A router that begins the wrong way round has something to learn.
    model = mixture(dense, [Split(s.shared, s.neurons, -s.router) for s in splits], 1)
    before = {n: p.clone() for n, p in model.named_parameters()}
    said = []
    routers = train_routers(model, dense, text, steps=60, rows=12, rate=0.1, on_step=said.append)
    assert said[-1] < 0.97 * said[0]
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert changed == [f"model.layers.{n}.mlp.gate.weight" for n in range(len(splits))]
    assert [r.shape for r in routers] == [s.router.shape for s in splits]


def test_it_is_a_plain_checkpoint(dense, text, tmp_path):
    model = mixture(dense, divide(dense, text, EXPERTS, 0), 1)
    save_checkpoint(model, tmp_path / "mixture")
    loaded, _ = load_base(tmp_path / "mixture", dtype="float32", device="cpu")
    assert loaded.config.model_type == "qwen2_moe"
    with torch.no_grad():
        torch.testing.assert_close(loaded(text.ids).logits, model(text.ids).logits)
