"""Intervals and tests against scipy, closed forms, and listing every case."""

import itertools
import math
import random

import numpy as np
import pytest
from scipy import stats

from freemoe.core.errors import DataError, NumericError
from freemoe.evals.statistics import (
    cluster_bootstrap,
    cluster_sums,
    holm,
    mcnemar,
    paired_test,
    ratio_bootstrap,
    share_bootstrap,
    smallest_p,
)


def names(count):
    return [str(i) for i in range(count)]


def listed_sign_flips(values):
    """Share of all 2^n sign patterns whose sum is at least the one seen."""
    seen = math.fsum(values)
    sums = [
        math.fsum(s * abs(v) for s, v in zip(signs, values, strict=True))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    return sum(s >= seen - 1e-9 for s in sums) / len(sums)


def test_cluster_sums():
    sums, counts = cluster_sums([1, 2, 4, 8], ["b", "a", "b", "c"])
    assert sums.tolist() == [5, 2, 8]
    assert counts.tolist() == [2, 1, 1]


def test_bootstrap_equals_scipys_percentile_interval():
    values = np.random.default_rng(0).normal(0.3, 1.0, 80)
    ours = cluster_bootstrap(values.tolist(), names(80), seed=1, draws=20000)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert ours.mean == pytest.approx(values.mean())
    assert ours.low == pytest.approx(theirs.low, abs=0.01)
    assert ours.high == pytest.approx(theirs.high, abs=0.01)
    narrow = cluster_bootstrap(values.tolist(), names(80), seed=1, draws=20000, level=0.5)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20000, method="percentile", confidence_level=0.5,
        rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    assert (narrow.low, narrow.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_clusters_are_drawn_whole():
    # Ten copies of each of eight documents carry the information of eight, not of eighty.
    rng = np.random.default_rng(3)
    single = rng.normal(size=8)
    copied, keys = np.repeat(single, 10).tolist(), [str(i) for i in range(8) for _ in range(10)]
    alone = cluster_bootstrap(single.tolist(), names(8), draws=4000)
    together = cluster_bootstrap(copied, keys, draws=4000)
    apart = cluster_bootstrap(copied, names(80), draws=4000)
    assert together.low == pytest.approx(alone.low, abs=1e-9)
    assert together.high == pytest.approx(alone.high, abs=1e-9)
    assert apart.high - apart.low < 0.5 * (together.high - together.low)


def test_bootstrap_of_unequal_clusters_is_a_mean_over_documents():
    interval = cluster_bootstrap([1, 1, 1, 0], ["a", "a", "a", "b"], draws=4000)
    assert interval.mean == 0.75
    # The four draws of two clusters: aa 1, ab and ba 3/4, bb 0.
    assert (interval.low, interval.high) == (0.0, 1.0)
    halves = cluster_bootstrap([1, 1, 1, 0], ["a", "a", "a", "b"], draws=4000, level=0.4)
    assert (halves.low, halves.high) == (0.75, 0.75)


def test_bootstrap_is_seeded_and_scales():
    a, b, c = (cluster_bootstrap([0, 1, 1, 0, 1], names(5), seed=s) for s in (0, 0, 1))
    assert a == b
    assert a.mean == c.mean
    scaled = a.scaled(100)
    assert (scaled.mean, scaled.low, scaled.high) == (100 * a.mean, 100 * a.low, 100 * a.high)
    constant = cluster_bootstrap([2.5] * 6, names(6))
    assert (constant.mean, constant.low, constant.high) == (2.5, 2.5, 2.5)


def test_coverage_of_the_interval():
    rng = np.random.default_rng(5)
    hits = 0
    for i in range(200):
        found = cluster_bootstrap(rng.normal(1.0, 2.0, 60).tolist(), names(60), seed=i, draws=400)
        hits += found.low <= 1.0 <= found.high
    assert 180 <= hits <= 199


def test_ratio_bootstrap():
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 50, 40)
    base = tokens * rng.normal(4, 0.2, 40)
    top = base - tokens * rng.normal(0.1, 0.05, 40)
    ratio = ratio_bootstrap(top.tolist(), base.tolist(), tokens.tolist(), names(40))
    perplexity = [math.exp(x.sum() / tokens.sum()) for x in (top, base)]
    assert ratio.mean == pytest.approx(perplexity[0] / perplexity[1])
    assert ratio.low < ratio.mean < ratio.high < 1
    # The same factor everywhere leaves nothing to vary, however long the documents are.
    same = ratio_bootstrap((base - 0.3 * tokens).tolist(), base.tolist(), tokens.tolist(), names(40))
    assert (same.mean, same.low, same.high) == pytest.approx((math.exp(-0.3),) * 3)
    copies = ratio_bootstrap([*top, *top], [*base, *base], [*tokens, *tokens], names(40) * 2)
    assert (copies.low, copies.high) == pytest.approx((ratio.low, ratio.high))


@pytest.mark.parametrize(("won", "lost"), [(1, 0), (5, 0), (8, 3), (3, 8), (60, 41), (20, 20)])
def test_right_or_wrong_is_the_exact_one_sided_mcnemar_test(won, lost):
    differences = [1.0] * won + [-1.0] * lost + [0.0] * 30
    random.Random(0).shuffle(differences)
    expected = stats.binomtest(won, won + lost, 0.5, alternative="greater").pvalue
    assert paired_test(differences, names(len(differences))) == pytest.approx(expected, rel=1e-9)
    scaled = [100 * d for d in differences]
    assert paired_test(scaled, names(len(scaled))) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-10, 1e6])
@pytest.mark.parametrize("seed", range(6))
def test_sign_flips_equal_listing_all_of_them(seed, scale):
    rng = random.Random(seed)
    values = [rng.choice([rng.gauss(0.4, 1), 0.0, 0.1, -0.3]) for _ in range(10)]
    expected = listed_sign_flips([v for v in values if v]) if any(values) else 1.0
    found = paired_test([scale * v for v in values], names(10))
    assert found == pytest.approx(expected, abs=1e-12)


def test_many_sign_flips_are_drawn():
    values = np.random.default_rng(1).normal(0.25, 1, 60).tolist()
    drawn = paired_test(values, names(60))
    t = stats.ttest_1samp(values, 0, alternative="greater").pvalue
    assert drawn == pytest.approx(t, abs=0.01)
    assert paired_test(values, names(60)) == drawn
    sure = paired_test([1 + i / 100 for i in range(60)], names(60), draws=1000)
    # Never zero: the pattern seen is one of those counted.
    assert sure == 1 / 1001


def test_signs_of_a_cluster_flip_together():
    # Four documents that say the same are one witness.
    assert paired_test([1, 1, 1, 1], ["a"] * 4) == 0.5
    assert paired_test([1, 1, 1, 1], names(4)) == 1 / 16
    # Differences that cancel inside a cluster are no difference.
    assert paired_test([1, -1], ["a", "a"]) == 1.0
    assert paired_test([0, 0, 0], names(3)) == 1.0


def test_the_test_keeps_its_level():
    rng = np.random.default_rng(2)
    p = [paired_test(rng.choice([-1, 0, 1], 40).tolist(), names(40)) for _ in range(400)]
    assert np.mean(np.array(p) <= 0.05) <= 0.075


def test_mcnemar():
    base = [1, 1, 0, 0, 0, 0, 0, 1]
    other = [1, 0, 1, 1, 1, 1, 0, 1]
    assert mcnemar(base, other) == (4, 1, pytest.approx(stats.binomtest(4, 5, 0.5).pvalue))
    assert mcnemar(other, base) == (1, 4, pytest.approx(stats.binomtest(4, 5, 0.5).pvalue))
    assert mcnemar([1, 0], [1, 0]) == (0, 0, 1.0)
    assert mcnemar([1, 0], [0, 1]) == (1, 1, 1.0)
    with pytest.raises(DataError, match="2 and 3"):
        mcnemar([1, 0], [1, 0, 1])


def test_holm_by_hand():
    # Sorted 0.01 0.02 0.03 0.04 times 4 3 2 1 is 0.04 0.06 0.06 0.04; running maximum 0.04 0.06 0.06 0.06.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.001, 0.9]) == pytest.approx([1.0, 0.003, 1.0])
    assert holm([0.03]) == [0.03]
    assert holm([]) == []
    assert holm([0.02, 0.02]) == [0.04, 0.04]


def test_smallest_p():
    assert smallest_p(5) == paired_test([1.0] * 5, names(5)) == 1 / 32


@pytest.mark.parametrize("call", [cluster_bootstrap, paired_test])
def test_bad_input(call):
    with pytest.raises(DataError, match="empty"):
        call([], [])
    with pytest.raises(DataError, match="3 scores but 2"):
        call([1, 2, 3], ["a", "b"])
    with pytest.raises(NumericError, match="1 of 3"):
        call([1, math.nan, 2], names(3))
    with pytest.raises(NumericError, match="2 of 3"):
        call([math.inf, -math.inf, 2], names(3))


def test_a_share_is_the_ratio_of_means_with_both_sides_drawn_together():
    rival = [1.0, 2.0, 3.0, 4.0, 6.0]
    # A method that gains half as much on every document has no spread, however much the gains differ.
    half = share_bootstrap([([v / 2 for v in rival], rival, names(5))])
    assert (half.mean, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5))
    found = share_bootstrap([([2.0, 0.0, 3.0, 1.0, 4.0], rival, names(5))])
    assert found.mean == pytest.approx(10 / 16)
    # Listing all 5^5 draws gives the percentiles.
    top = [2.0, 0.0, 3.0, 1.0, 4.0]
    draws = itertools.product(range(5), repeat=5)
    ratios = [sum(top[i] for i in d) / sum(rival[i] for i in d) for d in draws]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])), abs=0.02)


def test_every_group_of_a_share_counts_the_same_and_clusters_stay_together():
    large = ([1.0] * 100, [1.0] * 100, names(100))
    small = ([0.0], [1.0], ["x"])
    assert share_bootstrap([large, small]).mean == pytest.approx(0.5)
    apart = share_bootstrap([([1.0, 0.0], [1.0, 1.0], ["a", "b"])])
    together = share_bootstrap([([1.0, 0.0], [1.0, 1.0], ["a", "a"])])
    assert (apart.low, apart.high) == (0.0, 1.0)
    assert (together.low, together.high) == (0.5, 0.5)


def test_a_rival_without_gain_has_no_share():
    assert math.isnan(share_bootstrap([([1.0, 1.0], [0.0, 0.0], names(2))]).mean)
    # A rival that gains in some draws only: the interval says that it has no end.
    assert share_bootstrap([([1.0, 1.0], [3.0, -1.0], names(2))]).high == math.inf
