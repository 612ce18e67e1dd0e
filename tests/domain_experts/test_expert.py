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


@pytest.fixture
def weights():
    return find_weights(tiny_model("llama"))


def ranked(band, weights, norms, name="d/0"):
    """The expert of a band, and the mask that it is chosen by."""
    rankings = BandRankings(weights, norms.get)
    expert = band_expert(name, band, rankings.band_ends(band), norms, weights)
    return expert, rankings.mask_of_band(band)


def off(name, place):
    return switch_expert("d/a", Mask({name: TensorMask.of_indices(torch.tensor([place]), place + 1)}))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("rule", ["wanda 1", "wanda 2", "wanda 4", "wanda inf", "magnitude", "random"])
def test_a_band_comes_back_bit_by_bit(rule, case, tmp_path):
    metric, _, p = rule.partition(" ")
    weights = find_weights(tiny_model(case).to(torch.bfloat16))
    norms = norms_of(weights, p or "2")
    for scope, patch, (start, end) in [("row", 1, (0.1, 0.2)), ("layer", 1, (0.9, 1)), ("row", 4, (0, 0.3))]:
        band = Band(metric, start, end, p or "2", scope, patch=patch, seed=5)
        expert, mask = ranked(band, weights, norms)
        back = through_disk(expert, tmp_path)
        assert (back.name, back.kind, back.band) == ("d/0", "band", band)
        # Another load of the same base, as on another machine.
        fresh = find_weights(tiny_model(case).to(torch.bfloat16))
        assert back.mask(fresh).is_equal(mask)
        assert same(back.to_tensors(), expert.to_tensors())


@pytest.mark.parametrize("edge", [(0.0, 1.0), (0.0, 0.1), (0.9, 1.0), (0.5, 0.51)])
def test_bands_at_the_edges(weights, edge, tmp_path):
    band = Band("magnitude", *edge, layers=(0, 1), sublayers="mlp")
    expert, mask = ranked(band, weights, {})
    back = through_disk(expert, tmp_path)
    expected = indices_of(mask)
    assert same(indices_of(back.mask(weights)), expected)
    assert back.band == band
    if edge == (0.0, 1.0):
        assert {k: len(v) for k, v in expected.items()} == {w.name: w.size for w in weights[4:7]}
    if edge == (0.5, 0.51):
        assert expected == {}


def test_a_band_expert_stores_norms_and_columns_only(weights):
    norms = norms_of(weights, "2")
    tensors = ranked(Band("wanda", 0.2, 0.3, sublayers="attention"), weights, norms)[0].to_tensors()
    mine = [w for w in weights if w.sublayer == "attention"]
    columns = sum(norms[tap].numel() for tap in {w.tap for w in mine})
    rows = sum(w.num_rows for w in mine)
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == 4 * columns + 2 * 2 * rows
    assert ranked(Band("magnitude", 0, 0.1), weights, norms)[0].norms == {}


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


def test_experts_share_a_file_without_mixing(weights):
    experts = [
        ranked(Band("wanda", 0.1, 0.2), weights, norms_of(weights, "2"), "d/a")[0],
        switch_expert("d/a|b", mask_of({weights[0].name: torch.tensor([1, 2])}, weights)),
        switch_expert("d/a b", mask_of({weights[1].name: torch.tensor([7])}, weights)),
        ranked(Band("magnitude", 0, 0.1), weights, {}, "d/a|norm")[0],
    ]
    tensors = {k: v for e in experts for k, v in e.to_tensors().items()}
    for expert in experts:
        back = DomainExpert.from_parts(expert.manifest_entry(), tensors)
        assert back.mask(weights).is_equal(expert.mask(weights)), expert.name
        assert same(back.to_tensors(), expert.to_tensors())


def test_an_expert_of_another_base(weights):
    with pytest.raises(ArtifactError, match=r"'d/a' .*layers\.9.* another base"):
        off("model.layers.9.mlp.up_proj.weight", 1).mask(weights)
    with pytest.raises(ArtifactError, match=r"1024 weights: 0 to 1023 allowed\. It was made for another base"):
        off(weights[0].name, weights[0].size).mask(weights)
    ends = {"gone": (torch.zeros(1, 4).long(), None)}
    with pytest.raises(ArtifactError, match="'gone'"):
        DomainExpert("d/b", "band", Band("magnitude", 0.5, 1), {}, ends).mask(weights)
