"""Artefacts are bound to one base by the values of its parameters."""

import torch

from freemoe.models.checkpoints.fingerprint import fingerprint_model
from tests.tiny import tiny_model


def test_the_same_values_in_bf16_and_fp32_are_the_same_base():
    model = tiny_model("llama")
    exact, half = fingerprint_model(model), fingerprint_model(model.to(torch.bfloat16))
    # The original fp32 values do not survive bf16, so that is another base.
    assert exact != half == fingerprint_model(model.float())


def test_one_changed_value_changes_it_and_large_parameters_are_read_in_pieces(llama, monkeypatch):
    before = fingerprint_model(llama)
    weight = llama.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        kept = weight[3, 5].clone()
        weight[3, 5] = torch.nextafter(kept, torch.tensor(9.0))
        assert fingerprint_model(llama) != before
        weight[3, 5] = kept
    monkeypatch.setattr("freemoe.models.checkpoints.fingerprint._CHUNK", 7)
    assert fingerprint_model(llama) == before


def test_tied_weights_count_once_and_are_not_the_untied_ones():
    tied = tiny_model("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert fingerprint_model(tied) != fingerprint_model(tiny_model("llama", tie_word_embeddings=False))


def test_names_and_shapes_count_too():
    first, second = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        first.weight.fill_(1.0)
        second.weight.fill_(1.0)
    assert fingerprint_model(first) != fingerprint_model(second)
    assert fingerprint_model(torch.nn.Sequential(first)) != fingerprint_model(first)
