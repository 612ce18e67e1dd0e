"""What an expert stores: bands and switches that come back bit by bit, and those of another base."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from freemoe.core.errors import ArtifactError
from freemoe.domain_experts.expert import DomainExpert, band_expert, switch_expert
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.weights import find_weights
from tests.masks import indices_of, mask_of
from tests.tiny import tiny_model


def through_disk(expert, folder):
    """The expert as another process finds it."""
    save_file(expert.to_tensors(), folder / "e.safetensors")
    described = json.loads(json.dumps(expert.manifest_entry()))
    return DomainExpert.from_parts(described, load_file(folder / "e.safetensors"))


def norms_of(weights, p, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for w in weights:
        x = torch.randn(9, w.num_experts, w.num_columns, generator=generator, dtype=torch.float64)
        found.setdefault(w.tap, torch.linalg.vector_norm(x, float(p), dim=0).float())
    return found


def off(name, place):
    return Mask({name: TensorMask.of_indices(torch.tensor([place]), place + 1)})


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("rule", ["wanda 1", "wanda 2", "wanda 4", "wanda inf", "magnitude", "random"])
def test_a_band_comes_back_bit_by_bit(rule, case, tmp_path):
    metric, _, p = rule.partition(" ")
    weights = find_weights(tiny_model(case).to(torch.bfloat16))
    norms = norms_of(weights, p or "2")
    rankings = BandRankings(weights, lambda tap: norms[tap])
    for scope, patch, (start, end) in [("row", 1, (0.1, 0.2)), ("layer", 1, (0.9, 1)), ("row", 4, (0, 0.3))]:
        band = Band(metric, start, end, p or "2", scope, patch=patch, seed=5)
        expert = band_expert("d/0", band, rankings.band_ends(band), norms, weights)
        back = through_disk(expert, tmp_path)
        assert (back.name, back.kind, back.band) == ("d/0", "band", band)
        # Another load of the same base, as on another machine.
        fresh = find_weights(tiny_model(case).to(torch.bfloat16))
        assert back.mask(fresh).is_equal(rankings.mask_of_band(band))
        assert same(back.to_tensors(), expert.to_tensors())


@pytest.mark.parametrize("edge", [(0.0, 1.0), (0.0, 0.1), (0.9, 1.0), (0.5, 0.51)])
def test_bands_at_the_edges(edge, tmp_path):
    weights = find_weights(tiny_model("llama"))
    band = Band("magnitude", *edge, layers=(0, 1), sublayers="mlp")
    rankings = BandRankings(weights, None)
    expert = band_expert("d/0", band, rankings.band_ends(band), {}, weights)
    back = through_disk(expert, tmp_path)
    expected = indices_of(rankings.mask_of_band(band))
    assert same(indices_of(back.mask(weights)), expected)
    assert back.band == band
    if edge == (0.0, 1.0):
        assert {k: len(v) for k, v in expected.items()} == {w.name: w.size for w in weights[4:7]}
    if edge == (0.5, 0.51):
        assert expected == {}


def test_a_band_expert_stores_norms_and_columns_only():
    weights = find_weights(tiny_model("llama"))
    norms = norms_of(weights, "2")
    rankings = BandRankings(weights, lambda tap: norms[tap])
    band = Band("wanda", 0.2, 0.3, sublayers="attention")
    tensors = band_expert("d/0", band, rankings.band_ends(band), norms, weights).to_tensors()
    mine = [w for w in weights if w.sublayer == "attention"]
    columns = sum(t.numel() for t in {w.tap: norms[w.tap] for w in mine}.values())
    rows = sum(w.num_rows for w in mine)
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == 4 * columns + 2 * 2 * rows
    free = band_expert("d/0", Band("magnitude", 0, 0.1), rankings.band_ends(Band("magnitude", 0, 0.1)), norms, weights)
    assert free.norms == {}


def test_columns_beyond_two_bytes_keep_their_value(tmp_path):
    ends = {"w": (torch.tensor([[65535, 3]]), torch.tensor([[65536, 70000]]))}
    back = through_disk(DomainExpert("d/0", "band", Band("magnitude", 0.1, 0.2), {}, ends), tmp_path)
    assert back.ends["w"][0].tolist() == [[65535, 3]]
    assert back.ends["w"][1].tolist() == [[65536, 70000]]


def test_switches_come_back(tmp_path):
    weights = find_weights(tiny_model("gpt2"))
    positions = {weights[0].name: torch.tensor([0, 5, 3000]), weights[3].name: torch.tensor([1535])}
    empty = {weights[1].name: torch.zeros(0, dtype=torch.int64)}
    back = through_disk(switch_expert("d/all", mask_of({**positions, **empty}, weights)), tmp_path)
    assert back.kind == "switch"
    assert same(indices_of(back.mask(weights)), positions)
    nothing = through_disk(switch_expert("d/all", Mask()), tmp_path)
    assert nothing.mask(weights).count == 0


def test_experts_share_a_file_without_mixing():
    weights = find_weights(tiny_model("llama"))
    norms = norms_of(weights, "2")
    rankings = BandRankings(weights, lambda tap: norms[tap])
    band = Band("wanda", 0.1, 0.2)
    experts = [
        band_expert("d/a", band, rankings.band_ends(band), norms, weights),
        switch_expert("d/a|b", mask_of({weights[0].name: torch.tensor([1, 2])}, weights)),
        switch_expert("d/a b", mask_of({weights[1].name: torch.tensor([7])}, weights)),
        band_expert("d/a|norm", Band("magnitude", 0, 0.1), rankings.band_ends(Band("magnitude", 0, 0.1)), {}, weights),
    ]
    tensors = {k: v for e in experts for k, v in e.to_tensors().items()}
    for expert in experts:
        back = DomainExpert.from_parts(expert.manifest_entry(), tensors)
        assert back.mask(weights).is_equal(expert.mask(weights)), expert.name
        assert same(back.to_tensors(), expert.to_tensors())


def test_an_expert_of_another_base():
    weights = find_weights(tiny_model("llama"))
    expert = switch_expert("d/a", off("model.layers.9.mlp.up_proj.weight", 1))
    with pytest.raises(ArtifactError, match=r"'d/a' .*layers\.9.* another base"):
        expert.mask(weights)
    beyond = switch_expert("d/a", off(weights[0].name, weights[0].size))
    with pytest.raises(ArtifactError, match=r"1024 weights: 0 to 1023 allowed\. It was made for another base"):
        beyond.mask(weights)
    ends = {"gone": (torch.zeros(1, 4).long(), None)}
    with pytest.raises(ArtifactError, match="'gone'"):
        DomainExpert("d/b", "band", Band("magnitude", 0.5, 1), {}, ends).mask(weights)
