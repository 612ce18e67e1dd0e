"""Running sums: whole ones are sums, those of large matrices keep what is common and forget what is not."""

import pytest
import torch

from freemoe.domain_experts.purify import running_sums
from freemoe.domain_experts.purify.running_sums import COUNTED, KEPT, SMALL, LowRankSum, RunningSum, state_bytes

CPU = torch.device("cpu")
WHOLE, LOW_RANK = (1, 20, 30), (1, 140, 150)
of_low_rank = pytest.mark.parametrize("shape", [LOW_RANK, (3, 190, 140)])
of_both_kinds = pytest.mark.parametrize("shape", [WHOLE, LOW_RANK])


def running_sum(shape):
    return running_sums.running_sum(shape, 0, CPU)


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_rank(shape, rank, seed):
    """A random matrix (E, R, C) of a rank, its directions of different strengths."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(*shape[:2], rank, generator=generator) * torch.arange(1, rank + 1)
    return left @ torch.randn(shape[0], rank, shape[2], generator=generator)


def test_a_whole_sum_is_the_sum():
    found = running_sum((2, 3, SMALL))
    assert not isinstance(found, LowRankSum)
    matrices = [drawn((2, 3, SMALL), i) for i in range(3)]
    for number, matrix in enumerate(matrices):
        found.add_matrix(matrix, 0.5 + number)
    torch.testing.assert_close(found.to_dense(), 0.5 * matrices[0] + 1.5 * matrices[1] + 2.5 * matrices[2])


@of_low_rank
def test_what_lies_in_few_directions_is_kept_exactly(shape):
    found = running_sum(shape)
    assert isinstance(found, LowRankSum)
    parts = [of_rank(shape, 4, 1), of_rank(shape, 4, 2)]
    expected = torch.zeros(shape)
    for turn in range(6):
        found.add_matrix(parts[turn % 2], 1.0 + turn)
        expected += (1.0 + turn) * parts[turn % 2]
    assert float((found.to_dense() - expected).norm() / expected.norm()) < 1e-4


@of_low_rank
def test_the_total_is_the_best_approximation_by_few_directions(shape):
    found, whole = running_sum(shape), torch.zeros(shape)
    common = of_rank(shape, 10, 5)
    for turn in range(30):
        noisy = common + drawn(shape, turn)
        found.add_matrix(noisy, 0.1)
        whole += 0.1 * noisy
    left, values, right = torch.linalg.svd(whole)
    best = left[..., :COUNTED] * values[:, None, :COUNTED] @ right[:, :COUNTED]
    assert float((found.to_dense() - best).norm() / best.norm()) < 0.05
    # What all have in common stays, most of what each has alone goes.
    assert float((found.to_dense() - 3 * common).norm()) < 0.5 * float((whole - 3 * common).norm())
    assert int(torch.linalg.matrix_rank(found.to_dense()).max()) <= COUNTED < KEPT


@of_both_kinds
def test_what_was_added_fades(shape):
    found, again = running_sum(shape), running_sum(shape)
    for matrix, left in ((of_rank(shape, 3, 1), 0.5), (of_rank(shape, 3, 2), 1.0)):
        found.scale_by(0.5)
        found.add_matrix(matrix, 1.0)
        again.add_matrix(matrix, left)
    # A first step of the search meets a matrix only roughly.
    torch.testing.assert_close(found.to_dense(), again.to_dense(), rtol=1e-4, atol=1e-3)
    found.scale_by(0.0)
    assert not found.to_dense().any()


@of_both_kinds
def test_a_copy_stays_as_it_was(shape):
    found = running_sum(shape)
    found.add_matrix(of_rank(shape, 2, 1), 1.0)
    kept, again, before = found.copy(), found.copy(), found.to_dense().clone()
    for changed in (found, again):
        changed.add_matrix(of_rank(shape, 2, 2), 1.0)
        assert not torch.equal(changed.to_dense(), before)
        assert torch.equal(kept.to_dense(), before)
    assert torch.equal(again.to_dense(), found.to_dense())


def test_the_same_seed_gives_the_same_bits_and_nothing_added_is_nothing():
    found, shape = [], (2, 140, 150)
    for _ in range(2):
        one = LowRankSum(shape, 4, CPU)
        assert not one.to_dense().any()
        one.add_matrix(torch.zeros(shape), 1.0)
        assert not one.to_dense().any()
        one.add_matrix(drawn(shape, 0), 1.0)
        found.append(one.to_dense())
    assert torch.equal(*found)
    assert found[0].any()


def test_bfloat16_gradients_count():
    matrix = of_rank(LOW_RANK, 3, 0).bfloat16()
    for found in (LowRankSum(LOW_RANK, 0, CPU), RunningSum(LOW_RANK, CPU)):
        for _ in range(4):
            found.add_matrix(matrix, 2.0)
        total = found.to_dense()
        assert total.dtype == torch.float32
        assert float((total - 8 * matrix.float()).norm() / total.norm()) < 0.02


def test_memory_is_that_of_vectors():
    assert state_bytes((1, 4096, 11008)) == 4 * (4096 + 11008) * KEPT
    assert state_bytes((2, 64, 128)) == 4 * 2 * 64 * 128
