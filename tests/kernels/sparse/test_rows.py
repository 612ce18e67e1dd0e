"""What experts have off, taken out of products: against masked copies of the weight."""

import numpy as np
import pytest
import torch

from freemoe.kernels.sparse import rows
from freemoe.kernels.sparse.rows import (
    SparseExperts,
    SparsePlaces,
    blocks_of,
    loops_available,
    reference_products,
    sparse_products,
)

needs_loops = pytest.mark.skipif(not loops_available(torch.float32), reason="numba is not installed")


def places_of(seed, count, size):
    chosen = np.random.default_rng(seed).choice(size[0] * size[1], count, replace=False)
    return SparsePlaces.from_indices(torch.from_numpy(np.sort(chosen)), *size)


def batch(each, size, dtype, share=0.05, others=2):
    """Tokens of several experts in a mixed order, and some that have none."""
    generator = torch.Generator().manual_seed(0)
    total = sum(each) + others
    x = torch.randn(total, size[1], generator=generator).to(dtype)
    weight = (torch.randn(size, generator=generator) / size[1] ** 0.5).to(dtype)
    order = torch.randperm(total, generator=generator).numpy()[: sum(each)]
    found = [places_of(i, round(share * size[0] * size[1]), size) for i in range(len(each))]
    return x, weight, SparseExperts.from_places(found), order, np.cumsum([0, *each])


SHAPES = [
    (each, size, 0.05) for each in ([1], [2, 2], [1, 3, 2], [40, 5], [300, 2]) for size in ((7, 5), (70, 33), (130, 64))
]
# Places beyond 16 bits; the widest matrix.
SHAPES += [([2, 3], (2000, 600), 0.003), ([1, 3], (3, rows.MOST_COLUMNS), 0.001)]


@needs_loops
@pytest.mark.parametrize(("each", "size", "share"), SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_products_equal_masked_copies(each, size, share, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    given = batch(each, size, torch.float32, share)
    rtol = 1e-4 if size[1] == rows.MOST_COLUMNS else 1e-5
    torch.testing.assert_close(sparse_products(*given), reference_products(*given), rtol=rtol, atol=1e-5)
    # What is off does something.
    assert not torch.allclose(reference_products(*given), given[0] @ given[1].T, atol=1e-3)


@needs_loops
@pytest.mark.parametrize("each", [[2, 1], [20, 30]], ids=str)
def test_bfloat16_within_its_rounding(each):
    x, weight, *rest = batch(each, (70, 65), torch.bfloat16)
    wanted = reference_products(x.float(), weight.float(), *rest)
    found = sparse_products(x, weight, *rest)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=2e-2)


@needs_loops
@pytest.mark.parametrize(("each", "limit"), [([4, 4], 1.1), ([20, 20], 2.0)], ids=str)
def test_bfloat16_rounds_once_for_few_rows_and_twice_for_many(each, limit):
    x, weight, *rest = batch(each, (256, 128), torch.bfloat16, others=0)
    exact = reference_products(x.float(), weight.float(), *rest)
    ours, copies = (
        way(x, weight, *rest).float().sub(exact).pow(2).mean().sqrt() for way in (sparse_products, reference_products)
    )
    assert float(ours) < limit * float(copies)


def spreading(x, weight):
    """As torch's product where oneDNN reads beyond a row's end, times zero: NaN in a row gets into the row before it."""
    y = x @ weight.T
    y[:-1][y[1:].isnan().any(1)] = torch.nan
    return y


@needs_loops
@pytest.mark.parametrize("dtype", rows.DTYPES, ids=str)
@pytest.mark.parametrize("each", [[1, 3], [2, 40]], ids=str)
@pytest.mark.parametrize("linear", [torch.nn.functional.linear, spreading])
def test_nan_stays_nan_and_spreads_no_further_than_in_torch(linear, each, dtype, monkeypatch):
    x, weight, *rest = batch(each, (20, 9), dtype)
    x[3] = float("nan")
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    wrong = sparse_products(x, weight, *rest).isnan()
    # Of few rows the loops make the products themselves, each row for itself.
    ours = len(x) <= rows._MOST_OWN[dtype]
    expected = (x if ours else linear(x, weight)).isnan().any(1)
    assert wrong[3].all()
    assert wrong.any(1).tolist() == expected.tolist()


def test_nothing_off_is_the_product_itself():
    x, weight, _, tokens, starts = batch([2, 3], (20, 9), torch.float32)
    none = SparseExperts.from_places([SparsePlaces.from_indices(torch.zeros(0, dtype=torch.int64), 20, 9)] * 2)
    torch.testing.assert_close(reference_products(x, weight, none, tokens, starts), x @ weight.T)
    if loops_available(torch.float32):
        torch.testing.assert_close(sparse_products(x, weight, none, tokens, starts), x @ weight.T)


def test_places_come_back_and_are_small():
    flat = torch.tensor([0, 4, 5, 6, 699, 70_000 - 1])
    found = SparsePlaces.from_indices(flat, 100, 700)
    assert found.flat_indices(700).tolist() == flat.tolist()
    assert found.count == 6
    large = places_of(0, 8847, (1536, 576))
    assert large.num_bytes < 2.8 * large.count


def test_types_without_loops():
    assert not loops_available(torch.float16)
    assert not loops_available(torch.float64)


def test_blocks_of_tokens():
    found = blocks_of(np.array([0, 3, 3, 8]), size=2)
    assert found.tolist() == [[0, 0, 2], [0, 2, 3], [2, 3, 5], [2, 5, 7], [2, 7, 8]]
    assert blocks_of(np.array([0])).shape == (0, 3)
