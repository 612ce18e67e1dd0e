"""Shares of a rival's gain against listing every draw."""

import itertools
import math

import numpy as np
import pytest

from benchmarks.shares import share_bootstrap


def names(count):
    return [str(i) for i in range(count)]


def test_a_share_is_the_ratio_of_means_with_both_sides_drawn_together():
    rival = [1.0, 2.0, 3.0, 4.0, 6.0]
    # A method that gains half as much on every document has no spread, however much the gains differ.
    half = share_bootstrap([([v / 2 for v in rival], rival, names(5))])
    assert (half.mean, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5))
    top = [2.0, 0.0, 3.0, 1.0, 4.0]
    found = share_bootstrap([(top, rival, names(5))])
    assert found.mean == pytest.approx(10 / 16)
    # Listing all 5^5 draws gives the percentiles.
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
