"""Bands whose mask is made while the weight is read: against the masks that experts are made of."""

import numpy as np
import pytest
import torch
from torch import nn

from freemoe.domain_experts.rank.bands import Band, band_tile, columns_at, mask_between, rank_range
from freemoe.kernels.sparse.bands import BandTiles, reference_tiled_products, tiles_available
from freemoe.models.weights import WeightMatrix

BANDS = [(0.0, 0.1), (0.3, 0.5), (0.9, 1.0), (0.0, 1.0)]


def weight_of(size, seed=0, steps=4):
    """A weight of few different values, so that many importances are equal."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    values = (values * steps).round() / steps
    linear = nn.Linear(1, 1)
    linear.weight = nn.Parameter(values, requires_grad=False)
    return WeightMatrix("w", 0, "mlp", "tap", linear, "weight", "rows")


def tile_of(weight, start, end, metric="magnitude", norm=None):
    band = Band(metric, start, end)
    scores = weight.read_values().float().abs() * (1 if norm is None else norm[:, None, :])
    low, high = rank_range(start, end, weight.num_columns)
    ends = columns_at(scores, [r for r in (low, high) if 0 < r < weight.num_columns])
    lower = ends[0] if low > 0 else None
    upper = ends[-1] if high < weight.num_columns else None
    tile = band_tile(band, weight, lambda tap: norm, lower, upper)
    assert tile is not None
    wanted = (
        mask_between(band, weight, lambda tap: norm, lower, upper).to_bools().view(weight.num_rows, weight.num_columns)
    )
    assert wanted.sum() == (high - low) * weight.num_rows
    assert torch.equal(tile.off_mask(weight.parameter), wanted)
    return tile


@pytest.mark.parametrize(("start", "end"), BANDS)
def test_a_tile_is_the_mask_of_its_band(start, end):
    weight = weight_of((9, 40))
    tile_of(weight, start, end)
    norm = torch.rand(1, 40, generator=torch.Generator().manual_seed(1)).mul(3).round() + 0.5
    tile = tile_of(weight, start, end, "wanda", norm)
    assert tile.num_bytes == 4 * (40 + 9 + 9)


@pytest.mark.parametrize(
    "band",
    [Band("random", 0, 0.5), Band("saliency", 0, 0.5), Band("magnitude", 0, 0.5, scope="layer"), Band("magnitude", 0, 0.5, patch=2)],
    ids=lambda band: f"{band.metric} {band.scope} {band.patch}",
)  # fmt: skip
def test_other_bands_have_no_tile(band):
    assert band_tile(band, weight_of((6, 8)), lambda tap: torch.ones(1, 8), None, None) is None


def batch(size, each, dtype):
    """Tokens of several bands' experts in a mixed order, and two that have none."""
    generator = torch.Generator().manual_seed(0)
    weight = weight_of(size)
    weight.parameter.data = weight.parameter.data.to(dtype)
    x = torch.randn(sum(each) + 2, size[1], generator=generator).to(dtype)
    tiles = BandTiles.from_tiles([tile_of(weight, *BANDS[i % len(BANDS)]) for i in range(len(each))])
    order = torch.randperm(len(x), generator=generator).numpy()[: sum(each)]
    return x, weight.parameter.data, tiles, order, np.cumsum([0, *each])


def test_the_reference_is_a_product_with_zeros():
    x, weight, tiles, tokens, starts = batch((5, 16), [2, 1], torch.float32)
    found = reference_tiled_products(x, weight, tiles, tokens, starts)
    for place, expert in enumerate([0, 0, 1]):
        off = tiles.tiles[expert].off_mask(weight)
        wanted = [sum(float(w) * float(v) for w, v, o in zip(row, x[tokens[place]], gone, strict=True) if not o) for row, gone in zip(weight, off, strict=True)]  # fmt: skip
        torch.testing.assert_close(found[place], torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_no_kernel_on_this_processor():
    assert not tiles_available(torch.zeros(2, 2))
