"""Switching off and on again: bit by bit, over all parameters, in every layout and precision."""

import pytest
import torch

from freemoe.models.mask import Mask, MaskError, TensorMask
from freemoe.models.switching import switched_off
from tests.masks import indices_of, mask_of
from tests.tiny import CASES, IDS, bits, model_and_weights, unchanged


def some(weights, share=0.1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = {w.name: (torch.rand(w.size, generator=generator) < share).nonzero().squeeze(1) for w in weights}
    return mask_of(drawn, weights)


@pytest.mark.parametrize("case", CASES)
def test_off_and_on_again_in_every_family(case):
    model, weights = model_and_weights(case)
    mask = some(weights)
    before = bits(model)
    expected = {w.name: w.canonical_view().clone(memory_format=torch.contiguous_format) for w in weights}
    for name, where in indices_of(mask).items():
        expected[name].view(-1)[where] = 0.0
    with switched_off(weights, mask):
        for weight in weights:
            assert torch.equal(weight.canonical_view(), expected[weight.name])
        changed = {k for k, v in bits(model).items() if not torch.equal(v, before[k])}
        assert changed == {w.name for w in weights}
    assert unchanged(model, before)


@pytest.mark.parametrize("case", ["llama", "gemma", "gpt2", "opt"])
def test_tied_heads_and_everything_else_stay(case):
    model, weights = model_and_weights(case, tie_word_embeddings=True)
    mine = {w.name for w in weights}
    rest = {k: v.clone() for k, v in model.state_dict().items() if k not in mine}
    assert any("lm_head" in k for k in rest)
    with switched_off(weights, mask_of({w.name: torch.arange(w.size) for w in weights}, weights)):
        assert all(not w.parameter.any() for w in weights)
        assert all(torch.equal(model.state_dict()[k], v) for k, v in rest.items())
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_it_nests_also_where_masks_overlap():
    model, weights = model_and_weights("gpt2")
    before = bits(model)
    with switched_off(weights, some(weights, 0.3, 1)):
        outer = bits(model)
        with switched_off(weights, some(weights, 0.3, 2)):
            assert not unchanged(model, outer)
        assert unchanged(model, outer)
    assert unchanged(model, before)


def test_restored_after_an_error():
    model, weights = model_and_weights("mixtral")
    before = bits(model)
    with pytest.raises(RuntimeError, match="on purpose"), switched_off(weights, some(weights)):
        raise RuntimeError("on purpose")
    assert unchanged(model, before)


def test_inside_inference_mode_and_training_afterwards(llama, weights):
    before = bits(llama)
    with torch.inference_mode(), switched_off(weights, some(weights)):
        pass
    assert unchanged(llama, before)
    with switched_off(weights, some(weights)):
        llama(input_ids=IDS, labels=IDS).loss.backward()
    assert unchanged(llama, before)
    assert all(w.parameter.grad is not None for w in weights)


def test_a_mask_of_other_weights_touches_nothing(llama, weights):
    before = bits(llama)
    good = mask_of({weights[1].name: torch.tensor([0])}, weights)
    larger = Mask({weights[0].name: TensorMask.of_indices(torch.tensor([0, 1024]), 1025)})
    with pytest.raises(MaskError, match=f"{weights[0].name} is of 1025 weights, but it has 1024"):
        switched_off(weights, good.union(larger))
    unknown = Mask({"model.x": TensorMask.of_indices(torch.tensor([0]), 9)})
    with pytest.raises(MaskError, match=r"'model\.x'.*14 weights"):
        switched_off(weights, good.union(unknown))
    assert unchanged(llama, before)
