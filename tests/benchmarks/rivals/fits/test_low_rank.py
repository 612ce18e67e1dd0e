"""LASER: the best matrix of a rank, and the planted cut that the stopping documents must find."""

import pytest
import torch

from benchmarks.rivals.fits.low_rank import RANKS, everywhere, laser, rank_for, rank_of, truncated
from freemoe.domain_experts.purify.batches import mean_loss
from tests.benchmarks.rivals.tiny_terms import TERMS, given


def test_truncation_is_the_best_of_its_rank():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 5, generator=generator)
    for rank in (1, 3, 5):
        cut = truncated(matrix, rank)
        assert int(torch.linalg.matrix_rank(cut)) == rank
        left = torch.linalg.svdvals(matrix)[rank:]
        # Eckart and Young: what is missing is the singular values that were left out.
        assert float((matrix - cut).square().sum()) == pytest.approx(float(left.square().sum()), abs=1e-5)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_rank_of_a_share_keeps_at_most_what_is_left(share):
    rank = rank_for(96, 32, share)
    assert rank * (96 + 32) <= (1 - share) * 96 * 32 < (rank + 1) * (96 + 32)
    assert rank_for(4, 4, 0.99) == 1


def test_laser_finds_the_planted_cut_and_takes_no_cut_that_does_not_help():
    model, materials = given()
    planted = materials.weights[9]
    clean = planted.canonical_view()[0].clone()
    rank = rank_of(planted, RANKS[2])
    with torch.no_grad():
        low = truncated(clean, rank)
        planted.canonical_view()[0].copy_(low)
    good = mean_loss(model, materials.batches(materials.stop))
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(low, full_matrices=True)
    # Noise outside of what the clean matrix uses, and weaker: the cut takes exactly it away.
    outside = left[:, rank:] @ (left[:, rank:].T @ noise @ right[rank:].T) @ right[rank:]
    with torch.no_grad():
        outside *= 0.9 * torch.linalg.svdvals(low)[rank - 1] / torch.linalg.matrix_norm(outside, 2)
        planted.canonical_view()[0].copy_(low + outside)
    with laser(model, materials, TERMS) as fitted:
        inside = mean_loss(model, materials.batches(materials.stop))
        assert min(fitted.losses) == pytest.approx(inside, abs=1e-5)
        cut = fitted.facts["cut"]
        assert cut is not None
        assert inside <= fitted.losses[0]
        if cut["weight"] == planted.name and cut["rank"] == rank:
            assert inside == pytest.approx(good, abs=1e-4)
    # Every candidate by hand: among those compared at the end none is better than the one that was taken.
    assert fitted.facts["tried"] >= len(materials.weights)


def test_everywhere_every_matrix_has_the_rank_of_the_share():
    model, materials = given()
    kept = 0
    with everywhere(model, materials, TERMS) as fitted:
        for weight in materials.weights:
            wanted = rank_for(weight.num_rows, weight.num_columns, TERMS.share)
            assert int(torch.linalg.matrix_rank(weight.canonical_view()[0], rtol=1e-4)) == wanted
            kept += wanted * (weight.num_rows + weight.num_columns)
        assert fitted.share_off == pytest.approx(1 - kept / materials.size)
