"""Running sums: whole ones are sums, those of large matrices keep what is common and forget what is not."""

import pytest
import torch

from freemoe.domain_experts.purify.running_sums import (
    COUNTED,
    KEPT,
    SMALL,
    LowRankSum,
    RunningSum,
    running_sum,
    state_bytes,
)

CPU = torch.device("cpu")
SHAPES = [(1, 140, 150), (3, 190, 140)]


def of_rank(shape, rank, seed):
    """A random matrix (E, R, C) of a rank, its directions of different strengths."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(*shape[:2], rank, generator=generator) * torch.arange(1, rank + 1)
    return left @ torch.randn(shape[0], rank, shape[2], generator=generator)


def test_a_whole_sum_is_the_sum():
    found = running_sum((2, 3, SMALL), 0, CPU)
    assert not isinstance(found, LowRankSum)
    matrices = [torch.randn(2, 3, SMALL, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for number, matrix in enumerate(matrices):
        found.add_matrix(matrix, 0.5 + number)
    torch.testing.assert_close(found.to_dense(), 0.5 * matrices[0] + 1.5 * matrices[1] + 2.5 * matrices[2])


@pytest.mark.parametrize("shape", SHAPES)
def test_what_lies_in_few_directions_is_kept_exactly(shape):
    found = running_sum(shape, 0, CPU)
    assert isinstance(found, LowRankSum)
    parts = [of_rank(shape, 4, 1), of_rank(shape, 4, 2)]
    expected = torch.zeros(shape)
    for turn in range(6):
        found.add_matrix(parts[turn % 2], 1.0 + turn)
        expected += (1.0 + turn) * parts[turn % 2]
    assert float((found.to_dense() - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_the_total_is_the_best_approximation_by_few_directions(shape):
    found = LowRankSum(shape, 0, CPU)
    whole = torch.zeros(shape)
    common = of_rank(shape, 10, 5)
    for turn in range(30):
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(turn))
        found.add_matrix(common + noise, 0.1)
        whole += 0.1 * (common + noise)
    left, values, right = torch.linalg.svd(whole)
    best = left[..., :COUNTED] * values[:, None, :COUNTED] @ right[:, :COUNTED]
    assert float((found.to_dense() - best).norm() / best.norm()) < 0.05
    # What all have in common stays, most of what each has alone goes.
    assert float((found.to_dense() - 3 * common).norm()) < 0.5 * float((whole - 3 * common).norm())
    assert int(torch.linalg.matrix_rank(found.to_dense()).max()) <= COUNTED < KEPT


@pytest.mark.parametrize("shape", [(1, 20, 30), (1, 140, 150)])
def test_what_was_added_fades(shape):
    found = running_sum(shape, 0, CPU)
    a, b = of_rank(shape, 3, 1), of_rank(shape, 3, 2)
    for matrix in (a, b):
        found.scale_by(0.5)
        found.add_matrix(matrix, 1.0)
    # A first step of the search meets a matrix only roughly.
    again = running_sum(shape, 0, CPU)
    again.add_matrix(a, 0.5)
    again.add_matrix(b, 1.0)
    torch.testing.assert_close(found.to_dense(), again.to_dense(), rtol=1e-4, atol=1e-3)
    found.scale_by(0.0)
    assert not found.to_dense().any()


@pytest.mark.parametrize("shape", [(1, 20, 30), (1, 140, 150)])
def test_a_copy_stays_as_it_was(shape):
    found = running_sum(shape, 0, CPU)
    found.add_matrix(of_rank(shape, 2, 1), 1.0)
    kept, before = found.copy(), found.to_dense().clone()
    found.add_matrix(of_rank(shape, 2, 2), 1.0)
    assert torch.equal(kept.to_dense(), before)
    assert not torch.equal(found.to_dense(), before)
    again = kept.copy()
    again.add_matrix(of_rank(shape, 2, 2), 1.0)
    assert torch.equal(again.to_dense(), found.to_dense())
    assert torch.equal(kept.to_dense(), before)


def test_the_same_seed_gives_the_same_bits_and_nothing_added_is_nothing():
    found = []
    for _ in range(2):
        one = LowRankSum((2, 140, 150), 4, CPU)
        assert not one.to_dense().any()
        one.add_matrix(torch.zeros(2, 140, 150), 1.0)
        assert not one.to_dense().any()
        one.add_matrix(torch.randn(2, 140, 150, generator=torch.Generator().manual_seed(0)), 1.0)
        found.append(one.to_dense())
    assert torch.equal(*found)
    assert found[0].any()


def test_bfloat16_gradients_count():
    matrix = of_rank((1, 140, 150), 3, 0).bfloat16()
    for shape_sum in (LowRankSum((1, 140, 150), 0, CPU), RunningSum((1, 140, 150), CPU)):
        for _ in range(4):
            shape_sum.add_matrix(matrix, 2.0)
        total = shape_sum.to_dense()
        assert total.dtype == torch.float32
        assert float((total - 8 * matrix.float()).norm() / total.norm()) < 0.02


def test_memory_is_that_of_vectors():
    assert state_bytes((1, 4096, 11008)) == 4 * (4096 + 11008) * KEPT
    assert state_bytes((2, 64, 128)) == 4 * 2 * 64 * 128
