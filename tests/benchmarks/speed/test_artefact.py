"""Sizes that are computed are the sizes of files, and an expert that does not come back is counted."""

import pytest
import torch
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import Settings
from benchmarks.speed import artefact
from benchmarks.speed.artefact import file_bytes, run, shapes_of, stand_in
from freemoe.core.errors import FreeMoEError
from freemoe.domain_experts.expert import DomainExpert, band_expert, switch_expert
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.models.weights import find_weights
from tests.masks import indices_of, mask_of
from tests.tiny import tiny_model


@pytest.mark.parametrize("case", ["llama", "mixtral", "gpt2"])
def test_computed_bytes_are_those_of_the_file(case):
    weights = find_weights(tiny_model(case))
    norms = {w.tap: torch.rand(w.num_experts, w.num_columns) for w in weights}
    experts = []
    for band in (Band("wanda", 0.2, 0.3), Band("wanda", 0.0, 0.1), Band("magnitude", 0.0, 1.0)):
        ends = BandRankings(weights, norms.__getitem__).band_ends(band)
        experts.append(band_expert("math/ü", band, ends, norms, weights))
    off = {w.name: torch.arange(0, w.size, 7 + i) for i, w in enumerate(weights)}
    experts.append(switch_expert("d/0", mask_of(off, weights)))
    experts.append(DomainExpert("d/1", "band", band, {}, {"w": (torch.tensor([[70000]]), torch.tensor([[3]]))}))
    for tensors in (expert.to_tensors() for expert in experts):
        assert file_bytes(shapes_of(tensors)) == len(save(tensors))


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_stand_in_has_the_weights_of_the_model(model_type):
    values = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}  # fmt: skip
    real = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    theirs, ours = find_weights(real), find_weights(stand_in(model_type, values))
    assert [(w.name, w.shape, w.tap, w.layout) for w in ours] == [(w.name, w.shape, w.tap, w.layout) for w in theirs]
    assert sum(w.size for w in ours) == sum(w.parameter.numel() for w in theirs)
    # One number in memory for all of them.
    assert {w.parameter.untyped_storage().nbytes() for w in ours} == {2}


def test_a_quick_run():
    outcome = run(Settings(quick=True))
    figures = {f.name: f for f in outcome.figures}
    exact = figures["weights that differ after save, load, regenerate"]
    assert (exact.value, exact.target, exact.better) == (0, 0, "lower")
    # 2 ends of 2 bytes per row, 4 bytes per column of every input, and names.
    numbers = 32 * (4 * (4 * 4096 + 2 * 11008 + 4096) + 4 * (3 * 4096 + 11008))
    base = 2 * 6_738_415_616
    assert 100 * numbers / base < figures["band expert, Llama-2-7B shape"].value < 101 * numbers / base
    assert figures["band expert, Llama-2-7B shape"].target == 0.1
    # At 1 % off a weight takes 8.1 bits.
    switch = figures["switch expert, 1 % off, Llama-2-7B shape"]
    assert switch.value == pytest.approx(100 * 0.01 * 6_476_005_376 * 8.11 / 8 / base, rel=0.01)
    assert switch.target == 1.0


def test_an_expert_that_comes_back_wrong_is_seen(monkeypatch):
    monkeypatch.setattr(artefact, "PUBLISHED", {})
    mask = DomainExpert.mask

    def without_first(expert, weights):
        return mask_of({k: v[1:] for k, v in indices_of(mask(expert, weights)).items()}, weights)

    monkeypatch.setattr(DomainExpert, "mask", without_first)
    exact = run(Settings(quick=True)).figures[0]
    # One of each of 14 weights, two kinds, three loads.
    assert exact.value == 14 * 2 * 3
    assert exact.verdict(quick=False) == "missed"


def test_a_wrong_computed_size_stops_the_benchmark(monkeypatch):
    monkeypatch.setattr(artefact, "file_bytes", lambda shapes: 8 + 7)
    with pytest.raises(FreeMoEError, match="computed sizes are wrong"):
        run(Settings(quick=True))
