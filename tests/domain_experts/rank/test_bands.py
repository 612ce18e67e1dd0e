"""Bands against an explicit sort of (score, column), row by row, in every layout."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from freemoe.core.errors import NumericError
from freemoe.domain_experts.rank import bands
from freemoe.domain_experts.rank.bands import Band, BandRankings, band_grid, band_mask, columns_at, mask_between
from freemoe.domain_experts.rank.importance import seeded_generator
from freemoe.domain_experts.recipe import BandSection
from freemoe.models.weights import WeightMatrix, find_weights
from tests.masks import indices_of
from tests.tiny import tiny_model

EDGES = [(0.0, 0.1), (0.4, 0.55), (0.9, 1.0), (0.0, 1.0)]


def one(matrix, layer=0, sublayer="mlp"):
    """A weight of its own from a matrix (rows, columns) or (experts, rows, columns)."""
    layout = "rows" if matrix.ndim == 2 else "experts"
    module = nn.Module()
    module.weight = nn.Parameter(matrix.clone())
    return WeightMatrix("w", layer, sublayer, "tap", module, "weight", layout)


def norms_of(weights, seed=0):
    """Made-up norms with repeats and zeros: ``tap -> (experts, columns)``."""
    generator = torch.Generator().manual_seed(seed)
    taps = {w.tap: (w.num_experts, w.num_columns) for w in weights}
    found = {tap: torch.rand(*shape, generator=generator).mul(8).round() / 4 for tap, shape in taps.items()}
    return lambda tap: found[tap]


def brute_force(band, weight, norm):
    """Positions by plain Python: score every unit, sort by (score, column), cut, spread over patches."""
    size = weight.parameter.detach().float().abs()
    if weight.layout.endswith("columns"):
        size = size.transpose(-1, -2)
    size, places = size.reshape(weight.shape), np.arange(weight.size).reshape(weight.shape)
    noise = torch.rand(weight.shape, generator=seeded_generator(band.seed, weight.name), dtype=torch.float32)
    scores = {"magnitude": size, "random": noise, "wanda": size * norm(weight.tap)[:, None]}[band.metric].numpy()
    (_, rows, columns), side, found = weight.shape, band.patch, []
    for own, at in zip(scores, places, strict=True):
        # Added one by one, as float32: ties stay ties.
        groups = [
            [
                (sum(own[i : i + side, j : j + side].flat, np.float32(0)), at[i : i + side, j : j + side].ravel())
                for j in range(0, columns, side)
            ]
            for i in range(0, rows, side)
        ]
        for group in [list(itertools.chain(*groups))] if band.scope == "layer" else groups:
            ranked = sorted(group, key=lambda unit: unit[0])
            first, last = round(band.start * len(group)), round(band.end * len(group))
            found += [place for _, where in ranked[first:last] for place in where]
    return sorted(found)


@pytest.mark.parametrize("metric", ["wanda", "magnitude", "random"])
@pytest.mark.parametrize("scope", ["row", "layer"])
@pytest.mark.parametrize("patch", [1, 2, 4, 16])
def test_masks_equal_brute_force(metric, scope, patch):
    for seed, shape in enumerate([(20, 17), (5, 33), (3, 6, 10)]):
        weight = one(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16))
        norm = norms_of([weight], seed)
        for start, end in EDGES:
            band = Band(metric, start, end, scope=scope, patch=patch, seed=seed)
            found = indices_of(band_mask(band, [weight], norm)).get("w", torch.tensor([], dtype=torch.int64))
            assert found.tolist() == brute_force(band, weight, norm), band


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_models_equal_brute_force(case, dtype):
    weights = find_weights(tiny_model(case).to(dtype), layers=(1, 2))
    norm = norms_of(weights)
    for band in (Band("wanda", 0.35, 0.5), Band("magnitude", 0.0, 0.07, scope="layer"), Band("random", 0.9, 1.0)):
        found = indices_of(band_mask(band, weights, norm))
        assert list(found) == [w.name for w in weights]
        for weight in weights:
            assert found[weight.name].dtype == torch.int64
            assert found[weight.name].tolist() == brute_force(band, weight, norm), (weight.name, band)


def test_rank_range_has_no_gaps():
    assert bands.rank_range(0.0, 1.0, 7) == (0, 7)
    for size in (1, 7, 10, 33):
        cuts = [bands.rank_range(i / 20, (i + 1) / 20, size) for i in range(20)]
        assert cuts[0][0] == 0
        assert cuts[-1][1] == size
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))


def whole_numbers(low, high):
    return lambda shape, generator: torch.randint(low, high, shape, generator=generator).float()


MADE_UP = {
    "ties": whole_numbers(0, 4),
    "constant": whole_numbers(0, 1),
    "distinct": lambda shape, generator: torch.rand(shape, generator=generator),
    "zeros and denormals": lambda *given: whole_numbers(0, 3)(*given) * 1e-45,
    "up to the largest": lambda shape, generator: (
        torch.rand(shape, generator=generator).mul(200).exp2().clamp(max=3.4e38)
    ),
    "signed": whole_numbers(-2, 3),
    "both zeros": lambda *given: whole_numbers(-1, 2)(*given) * 0.0,
}


@pytest.mark.parametrize("make", MADE_UP.values(), ids=MADE_UP)
@pytest.mark.parametrize("shape", [(2, 6, 23), (1, 1, 1), (1, 3, 70000), (5, 40, 64)])
def test_columns_and_what_lies_between_them_are_those_of_a_stable_sort(make, shape):
    scores = make(shape, torch.Generator().manual_seed(2))
    size, rng = shape[-1], random.Random(0)
    ranks = sorted({0, size // 3, size // 2, size - 1})
    expected = torch.sort(scores, dim=-1, stable=True).indices
    found = bands.columns_at(scores, ranks)
    assert found.shape == (len(ranks), *shape[:-1])
    for rank, columns in zip(ranks, found, strict=True):
        assert torch.equal(columns.long(), expected[..., rank])
    # The layout in memory does not matter.
    turned = scores.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(bands.columns_at(turned, ranks), found)
    for low, high in [(0, size), (0, 1), *(sorted((rng.randrange(size), rng.randrange(size))) for _ in range(20))]:
        between = torch.zeros(shape, dtype=torch.bool).scatter_(-1, expected[..., low:high], True)
        lower, upper = expected[..., low] if low else None, expected[..., high] if high < size else None
        assert torch.equal(bands.mask_between_ends(scores, lower, upper), between), (low, high)


def test_many_rows_are_worked_on_in_parts(monkeypatch):
    scores = MADE_UP["ties"]((3, 500, 300), torch.Generator().manual_seed(2))
    order = torch.sort(scores, dim=-1, stable=True).indices
    expected = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, order[..., 30:99], True)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        lower, upper = bands.columns_at(scores, [30, 99])
        assert torch.equal(lower.long(), order[..., 30])
        assert torch.equal(bands.mask_between_ends(scores, lower, upper), expected)


def test_all_bands_of_a_grid_share_one_sort(monkeypatch):
    weights = find_weights(tiny_model("llama"), "mlp", (0, 1))
    norm = norms_of(weights)
    sorts = []
    monkeypatch.setattr(bands, "columns_at", lambda *given: sorts.append(len(given[1])) or columns_at(*given))
    section = BandSection(step=0.1, ratio=0.1)
    all_bands = [b for metric in ("wanda", "magnitude") for b in band_grid(section, metric, 0)]
    rankings = BandRankings(weights, norm, all_bands)
    found = [rankings.mask_of_band(b) for b in all_bands]
    assert sorts == [9] * len(weights) * 2
    # Bands that were not announced are sorted for, and right.
    more = [Band("wanda", 0.33, 0.41), *(Band("random", 0.1, 0.3, seed=seed) for seed in (0, 1))]
    more += [Band("magnitude", 0.1, 0.3, scope="layer"), Band("magnitude", 0.1, 0.3, patch=2)]
    found += [rankings.mask_of_band(b) for b in more]
    assert len(sorts) == len(weights) * (2 + len(more))
    rankings.clear_cache()
    for band, mask in zip([*all_bands, *more], found, strict=True):
        assert band_mask(band, weights, norm).is_equal(mask), band


def test_a_band_touches_only_what_it_covers():
    weights = find_weights(tiny_model("llama"))
    everything = band_mask(Band("magnitude", 0, 0.1), weights, None)
    for options, covered in (
        ({"sublayers": "attention"}, [w for w in weights if w.sublayer == "attention"]),
        ({"layers": (1, 2)}, [w for w in weights if w.layer == 1]),
        ({"sublayers": "mlp", "layers": (0, 1)}, [w for w in weights if w.layer == 0 and w.sublayer == "mlp"]),
    ):
        found = band_mask(Band("magnitude", 0, 0.1, **options), weights, None)
        assert set(found) == {w.name for w in covered}
        assert all(everything[name].is_equal(off) for name, off in found.items())


def test_many_columns_keep_their_numbers():
    # Above 32,767 units an order no longer fits into two bytes.
    weight = one(torch.randn(2, 40000, generator=torch.Generator().manual_seed(0)))
    for scope in ("row", "layer"):
        band, rankings = Band("magnitude", 0.0, 0.3, scope=scope), BandRankings([weight], None)
        found = rankings.mask_of_band(band)["w"]
        scores = weight.parameter.detach().abs()
        if scope == "row":
            expected = torch.cat([scores[r].argsort(stable=True)[:12000] + 40000 * r for r in range(2)])
        else:
            expected = scores.flatten().argsort(stable=True)[:24000]
        assert torch.equal(found.indices(), expected.sort().values)
        assert mask_between(band, weight, None, *rankings.band_ends(band)["w"]).is_equal(found)


def test_a_grid_has_names_of_its_own():
    grid = band_grid(BandSection(ratio=0.05, step=0.05), "wanda", 3)
    assert len({b.name for b in grid}) == len(grid) == 20
    assert grid[0].name == "wanda p=2 0-5 %"
    assert [b.start for b in grid] == sorted(b.start for b in grid)
    assert {b.seed for b in grid} == {3}
    rules = {"p": "inf", "scope": "layer", "sublayers": "mlp", "patch": 4}
    first = band_grid(BandSection(start=0.5, end=1.0, step=0.05, ratio=0.05, **rules), "wanda", 0)[0]
    assert first == Band("wanda", 0.5, 0.55, "inf", "layer", "mlp", None, 4, 0)


def test_nan_in_a_weight_is_refused():
    matrix = torch.ones(2, 4)
    matrix[0, 1] = math.nan
    with pytest.raises(NumericError, match="'w'"):
        band_mask(Band("magnitude", 0, 0.5), [one(matrix)], None)
    with pytest.raises(NumericError, match="8 of 8"):
        band_mask(Band("wanda", 0, 0.5), [one(torch.ones(2, 4))], lambda t: torch.full((1, 4), math.inf))
