"""Every way to compute the experts of a layer equals the reference, and the reference equals a dense MLP."""

import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from freemoe.kernels import experts as kernels
from freemoe.kernels.experts import ExpertNeurons, MLPWeights, index_mask, reference_experts
from freemoe.kernels.rows import ACTIVATIONS, heads_sum, heads_times, rows_available
from freemoe.kernels.triton_experts import token_blocks

HIDDEN, NEURONS, EXPERTS = 40, 70, 5
CLOSE = {"rtol": 0, "atol": 1e-5}

needs_numba = pytest.mark.skipif(not rows_available(torch.float32), reason="numba is not installed")


def layer(parts=2, biased=False, name="silu", share=0.5, seed=0):
    """Random weights and index lists of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator) / HIDDEN**0.5

    members = torch.rand(EXPERTS, NEURONS, generator=generator) < share
    members[0, 0] = True
    members[:, 1] = True
    index = torch.full((EXPERTS, int(members.sum(1).max())), -1, dtype=torch.int32)
    for row, own in zip(index, members, strict=True):
        row[: int(own.sum())] = own.nonzero().flatten()
    up_bias = normal(parts, NEURONS) if biased else None
    weights = MLPWeights(
        normal(parts, NEURONS, HIDDEN), normal(NEURONS, HIDDEN), up_bias, normal(HIDDEN) if biased else None,
        ACT2FN[name], name,
    )  # fmt: skip
    return weights, index


def tokens(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=generator)
    # The last expert gets none.
    return x, torch.randint(EXPERTS - 1, (count,), generator=generator)


def masked(x, expert, weights, index):
    return kernels.masked_experts(x, expert, weights, index_mask(index, NEURONS, x.dtype))


def grouped(x, expert, weights, index):
    return kernels.grouped_experts(x, expert, weights, ExpertNeurons(index, NEURONS))


def few(x, expert, weights, index):
    return kernels.rowwise_experts(x, expert, weights, ExpertNeurons(index, NEURONS))


WAYS = [masked, grouped, pytest.param(few, marks=needs_numba)]


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("parts", "biased", "name"), [*((2, False, n) for n in ACTIVATIONS), (2, True, "gelu"), (1, True, "gelu_new")]
)
@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_equals_the_reference(way, parts, biased, name, count):
    weights, index = layer(parts, biased, name)
    x, expert = tokens(count)
    before = x.clone()
    torch.testing.assert_close(way(x, expert, weights, index), reference_experts(x, expert, weights, index), **CLOSE)
    assert torch.equal(x, before)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_bfloat16(way):
    weights, index = layer(biased=True)
    x, expert = tokens(6)

    def cast(held, dtype):
        parts = (part.to(dtype) for part in (held.up, held.down, held.up_bias, held.down_bias))
        return MLPWeights(*parts, held.activation, held.name)

    low = cast(weights, torch.bfloat16)
    got = way(x.bfloat16(), expert, low, index)
    assert got.dtype == torch.bfloat16
    want = reference_experts(x.bfloat16().float(), expert, cast(low, torch.float32), index)
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.05)


@torch.no_grad()
def test_more_tokens_and_neurons_than_a_block(monkeypatch):
    monkeypatch.setattr(kernels, "TOKENS", 8)
    monkeypatch.setattr(kernels, "NEURONS", 7)
    weights, index = layer(biased=True)
    index[2] = torch.arange(10, 10 + index.shape[1])  # one run, which is not gathered
    x, _ = tokens(20)
    expert = torch.full((20,), 2)
    expert[5] = 0
    kinds = [{type(part) for part in own} for own in ExpertNeurons(index, NEURONS).parts]
    assert kinds[2] == {slice}
    assert torch.Tensor in kinds[0]
    torch.testing.assert_close(
        grouped(x, expert, weights, index), reference_experts(x, expert, weights, index), **CLOSE
    )


def test_the_two_masks_are_one():
    _, index = layer()
    own = ExpertNeurons(index, NEURONS).neuron_mask(torch.float32, index.device)
    assert torch.equal(index_mask(index, NEURONS, torch.float32), own)


@torch.no_grad()
def test_all_neurons_are_the_dense_mlp():
    weights, _ = layer()
    index = torch.arange(NEURONS, dtype=torch.int32).expand(EXPERTS, -1)
    x, expert = tokens(7)
    want = (F.silu(x @ weights.up[0].T) * (x @ weights.up[1].T)) @ weights.down
    torch.testing.assert_close(reference_experts(x, expert, weights, index), want, **CLOSE)


def test_masked_is_differentiable():
    weights, index = layer()
    x, expert = tokens(4)
    again = x.clone().requires_grad_()
    x.requires_grad_()
    masked(x, expert, weights, index).sum().backward()
    reference_experts(again, expert, weights, index).sum().backward()
    torch.testing.assert_close(x.grad, again.grad, **CLOSE)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2, 5, 8])
def test_products_with_dimensions_of_heads(dtype, heads):
    generator = torch.Generator().manual_seed(heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    matrix, bias, head_dim = normal(heads * 6, 20), normal(heads * 6), 6
    close = {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
    for count in (1, 4, 11):
        x, weights = normal(count, 20), normal(count, heads * head_dim)
        mask = torch.rand(count, head_dim, generator=generator) < 0.5
        everywhere = mask.repeat(1, heads).to(dtype)
        for own in (None, bias):
            product = x.float() @ matrix.float().T + (0 if own is None else own.float())
            torch.testing.assert_close(heads_times(x, mask, matrix, own), (product * everywhere).to(dtype), **close)
        want = ((weights * everywhere).float() @ matrix.float()).to(dtype)
        torch.testing.assert_close(heads_sum(weights, mask, matrix), want, **close)


@needs_numba
@torch.no_grad()
@pytest.mark.parametrize("cache", [1, 1 << 18], ids=["blocks of eight tokens", "one block"])
def test_threads_and_blocks_of_tokens(monkeypatch, cache):
    weights, index = layer(biased=True)
    x, expert = tokens(21)
    mask = torch.rand(21, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    alone = heads_times(x, mask, weights.down, None), heads_sum(x[:, :35], mask, weights.down[:35])
    monkeypatch.setattr("freemoe.kernels.rows._WORTH_A_THREAD", 100)
    monkeypatch.setattr("freemoe.kernels.rows._CACHE", cache)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.testing.assert_close(few(x, expert, weights, index), reference_experts(x, expert, weights, index), **CLOSE)
    torch.testing.assert_close(heads_times(x, mask, weights.down, None), alone[0], **CLOSE)
    torch.testing.assert_close(heads_sum(x[:, :35], mask, weights.down[:35]), alone[1], **CLOSE)


@pytest.mark.parametrize("expert", [[0, 0, 0, 0, 0, 0, 0], [3, 1, 1, 0, 3, 3, 3], [2]])
def test_blocks_hold_every_token_once_and_one_expert_each(expert):
    owner_of = torch.tensor(expert)
    order, owner, begin, end = token_blocks(owner_of, 4, size=2)
    seen = []
    for number, first, last in zip(owner.tolist(), begin.tolist(), end.tolist(), strict=True):
        if number >= 0:
            own = order[first : min(first + 2, last)].tolist()
            assert own
            assert {expert[t] for t in own} == {number}
            seen += own
    assert sorted(seen) == list(range(len(expert)))


@pytest.mark.parametrize(("share", "few"), [(0.3, 256), (0.9, 64)])
def test_wide_experts_have_a_mask_between_few_tokens_and_many(share, few):
    own = ExpertNeurons(layer(share=share)[1], NEURONS)
    assert (own.grouped, own.few) == (256, few)
