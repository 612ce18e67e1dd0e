"""What an expert stores: positions to bytes and back, bands that come back bit by bit, and damaged codes."""

import json
import math
import random

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from freemoe.core.errors import ArtifactError, DataError
from freemoe.domain_experts.expert import (
    Expert,
    band_expert,
    decode_positions,
    encode_positions,
    random_positions,
    switch_expert,
)
from freemoe.domain_experts.rank.bands import Band, Rankings
from freemoe.models.weights import find_weights
from tests.tiny import tiny_model


def through_disk(expert, folder):
    """The expert as another process finds it."""
    save_file(expert.to_tensors(), folder / "e.safetensors")
    described = json.loads(json.dumps(expert.describe()))
    return Expert.from_parts(described, load_file(folder / "e.safetensors"))


def norms_of(weights, p, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for w in weights:
        x = torch.randn(9, w.experts, w.columns, generator=generator, dtype=torch.float64)
        found.setdefault(w.tap, torch.linalg.vector_norm(x, float(p), dim=0).float())
    return found


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# ------------------------------------------------------------------- positions


def read_slowly(code):
    """Another reader of the code: bit by bit, from the words of its description."""
    data = bytes(code.tolist())
    k, count = data[0], int.from_bytes(data[1:9], "little")
    first = 9 + (count * k + 7) // 8
    low = "".join(f"{byte:08b}" for byte in data[9:first])
    high = "".join(f"{byte:08b}" for byte in data[first:]).split("1")
    values, before = [], -1
    for i in range(count):
        bits = low[i * k : (i + 1) * k]
        before += 1 + (len(high[i]) << k) + sum(int(bit) << n for n, bit in enumerate(bits))
        values.append(before)
    return values


@pytest.mark.parametrize("seed", range(40))
def test_positions_come_back(seed):
    rng = random.Random(seed)
    top = rng.choice([1, 2, 127, 128, 129, 300, 2**14, 2**21 + 5, 2**32, 2**45, 2**62])
    count = min(rng.choice([0, 1, 2, 5, 200]), top)
    values = sorted({rng.randrange(top) for _ in range(count)})
    if rng.random() < 0.5 and values:
        values[0] = 0
    code = encode_positions(torch.tensor(values, dtype=torch.int64))
    assert code.dtype == torch.uint8
    back = decode_positions(code)
    assert back.dtype == torch.int64
    assert back.tolist() == values
    assert read_slowly(code) == values


@pytest.mark.parametrize(
    "values",
    [[], [0], [1], [127], [128], [0, 127, 255], [2**63 - 1], [0, 2**63 - 1], [2**62, 2**63 - 1], list(range(999))],
)
def test_positions_at_the_edges(values):
    assert decode_positions(encode_positions(torch.tensor(values, dtype=torch.int64))).tolist() == values


def test_positions_take_hardly_more_than_their_entropy():
    assert encode_positions(torch.arange(1000)).numel() == 9 + 125
    assert encode_positions(torch.arange(1000) * 128).numel() == 9 + 1000
    generator = torch.Generator().manual_seed(0)
    for share in (0.001, 0.01, 0.1):
        positions = (torch.rand(800_000, generator=generator) < share).nonzero().flatten()
        entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share
        bits = 8 * (encode_positions(positions).numel() - 9) / positions.numel()
        assert 0.97 * entropy < bits < 1.03 * entropy


@pytest.mark.parametrize("bad", [[3, 2], [1, 1], [-1, 4]])
def test_positions_that_have_no_code(bad):
    with pytest.raises(DataError, match="ascending"):
        encode_positions(torch.tensor(bad))


def test_a_code_that_is_cut_short_or_too_long():
    code = encode_positions(torch.tensor([5, 1000, 70000]))
    for length in range(len(code)):
        with pytest.raises(ArtifactError, match="cut short"):
            decode_positions(code[:length])
    for tail in (0, 1):
        with pytest.raises(ArtifactError, match="cut short or edited"):
            decode_positions(torch.cat([code, torch.tensor([tail], dtype=torch.uint8)]))
    edited = code.clone()
    edited[1] += 1
    with pytest.raises(ArtifactError, match="cut short or edited"):
        decode_positions(edited)


# --------------------------------------------------------------------- experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("rule", ["wanda 1", "wanda 2", "wanda 4", "wanda inf", "magnitude", "random"])
def test_a_band_comes_back_bit_by_bit(rule, case, dtype, tmp_path):
    metric, _, p = rule.partition(" ")
    weights = find_weights(tiny_model(case).to(dtype))
    norms = norms_of(weights, p or "2")
    rankings = Rankings(weights, lambda tap: norms[tap])
    for scope, patch, (start, end) in [("row", 1, (0.1, 0.2)), ("layer", 1, (0.9, 1)), ("row", 4, (0, 0.3))]:
        band = Band(metric, start, end, p or "2", scope, patch=patch, seed=5)
        expert = band_expert("d/0", band, rankings.ends(band), norms, weights)
        back = through_disk(expert, tmp_path)
        assert (back.name, back.kind, back.band) == ("d/0", "band", band)
        # Another load of the same base, as on another machine.
        fresh = find_weights(tiny_model(case).to(dtype))
        assert same(back.positions(fresh), rankings.positions(band))
        assert same(back.to_tensors(), expert.to_tensors())


@pytest.mark.parametrize("edge", [(0.0, 1.0), (0.0, 0.1), (0.9, 1.0), (0.5, 0.51)])
def test_bands_at_the_edges(edge, tmp_path):
    weights = find_weights(tiny_model("llama"))
    band = Band("magnitude", *edge, layers=(0, 1), sublayers="mlp")
    rankings = Rankings(weights, None)
    expert = band_expert("d/0", band, rankings.ends(band), {}, weights)
    back = through_disk(expert, tmp_path)
    expected = rankings.positions(band)
    assert same(back.positions(weights), expected)
    assert back.band == band
    if edge == (0.0, 1.0):
        assert {k: len(v) for k, v in expected.items()} == {w.name: w.size for w in weights[4:7]}
    if edge == (0.5, 0.51):
        assert expected == {}


def test_a_band_expert_stores_norms_and_columns_only():
    weights = find_weights(tiny_model("llama"))
    norms = norms_of(weights, "2")
    rankings = Rankings(weights, lambda tap: norms[tap])
    band = Band("wanda", 0.2, 0.3, sublayers="attention")
    tensors = band_expert("d/0", band, rankings.ends(band), norms, weights).to_tensors()
    mine = [w for w in weights if w.sublayer == "attention"]
    columns = sum(t.numel() for t in {w.tap: norms[w.tap] for w in mine}.values())
    rows = sum(w.rows for w in mine)
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == 4 * columns + 2 * 2 * rows
    free = band_expert("d/0", Band("magnitude", 0, 0.1), rankings.ends(Band("magnitude", 0, 0.1)), norms, weights)
    assert free.norms == {}


def test_columns_beyond_two_bytes_keep_their_value(tmp_path):
    ends = {"w": (torch.tensor([[65535, 3]]), torch.tensor([[65536, 70000]]))}
    back = through_disk(Expert("d/0", "band", Band("magnitude", 0.1, 0.2), {}, ends), tmp_path)
    assert back.ends["w"][0].tolist() == [[65535, 3]]
    assert back.ends["w"][1].tolist() == [[65536, 70000]]


def test_switches_come_back(tmp_path):
    weights = find_weights(tiny_model("gpt2"))
    positions = {weights[0].name: torch.tensor([0, 5, 3000]), weights[3].name: torch.tensor([1535])}
    empty = {weights[1].name: torch.zeros(0, dtype=torch.int64)}
    back = through_disk(switch_expert("d/all", {**positions, **empty}), tmp_path)
    assert back.kind == "switch"
    assert same(back.positions(weights), positions)
    nothing = through_disk(switch_expert("d/all", {}), tmp_path)
    assert nothing.positions(weights) == {}


def test_a_base_expert_switches_nothing_off(tmp_path):
    weights = find_weights(tiny_model("llama"))
    expert = Expert("d/0")
    assert expert.to_tensors() == {}
    back = Expert.from_parts(expert.describe(), {})
    assert (back.kind, back.positions(weights)) == ("base", {})


def test_experts_share_a_file_without_mixing():
    weights = find_weights(tiny_model("llama"))
    norms = norms_of(weights, "2")
    rankings = Rankings(weights, lambda tap: norms[tap])
    band = Band("wanda", 0.1, 0.2)
    experts = [
        band_expert("d/a", band, rankings.ends(band), norms, weights),
        switch_expert("d/a|b", {weights[0].name: torch.tensor([1, 2])}),
        switch_expert("d/a b", {weights[1].name: torch.tensor([7])}),
        band_expert("d/a|norm", Band("magnitude", 0, 0.1), rankings.ends(Band("magnitude", 0, 0.1)), {}, weights),
    ]
    tensors = {k: v for e in experts for k, v in e.to_tensors().items()}
    for expert in experts:
        back = Expert.from_parts(expert.describe(), tensors)
        assert same(back.positions(weights), expert.positions(weights)), expert.name
        assert same(back.to_tensors(), expert.to_tensors())


def test_an_expert_of_another_base():
    weights = find_weights(tiny_model("llama"))
    expert = switch_expert("d/a", {"model.layers.9.mlp.up_proj.weight": torch.tensor([1])})
    with pytest.raises(ArtifactError, match=r"'d/a' .*layers\.9.* another base"):
        expert.positions(weights)
    ends = {"gone": (torch.zeros(1, 4).long(), None)}
    with pytest.raises(ArtifactError, match="'gone'"):
        Expert("d/b", "band", Band("magnitude", 0.5, 1), {}, ends).positions(weights)


def test_random_positions_are_as_many_in_the_same_weights():
    weights = find_weights(tiny_model("llama"))
    positions = {
        weights[0].name: torch.arange(100),
        weights[4].name: torch.tensor([7]),
        weights[5].name: torch.arange(0),
    }
    a, b, c = (random_positions(positions, weights, seed) for seed in (1, 1, 2))
    assert same(a, b)
    assert not same(a, c)
    assert {k: len(v) for k, v in a.items()} == {k: len(v) for k, v in positions.items()}
    for name, where in a.items():
        size = next(w.size for w in weights if w.name == name)
        assert where.dtype == torch.int64
        assert (where[1:] > where[:-1]).all()
        assert not len(where) or (int(where[0]) >= 0 and int(where[-1]) < size)
    whole = random_positions({weights[0].name: torch.arange(weights[0].size)}, weights, 0)
    assert torch.equal(whole[weights[0].name], torch.arange(weights[0].size))
    assert math.isclose(float(a[weights[0].name].float().mean()) / weights[0].size, 0.5, abs_tol=0.12)


def test_the_file_holds_no_pickled_code(tmp_path):
    save_file(switch_expert("d/a", {"w": torch.tensor([3])}).to_tensors(), tmp_path / "e.safetensors")
    assert list(load((tmp_path / "e.safetensors").read_bytes())) == ["d/a|switch|w"]
