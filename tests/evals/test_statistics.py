"""Intervals and tests against scipy, closed forms, and listing every case."""

import itertools
import math
import random

import numpy as np
import pytest
from scipy import stats

from freemoe.core.errors import DataError, NumericError
from freemoe.evals.statistics import (
    detectable_effect,
    detectable_gain,
    holm,
    mcnemar,
    mean_interval,
    mean_of_means,
    paired_test,
)
from freemoe.evals.verdict import perplexity_against


def names(count):
    return [str(i) for i in range(count)]


def listed_sign_flips(values):
    """Share of all 2^n sign patterns whose sum is at least the one seen."""
    sums = [math.fsum(flipped) for flipped in itertools.product(*((abs(v), -abs(v)) for v in values))]
    return sum(s >= math.fsum(values) - 1e-9 for s in sums) / len(sums)


@pytest.mark.parametrize(("won", "lost", "same"), [(0, 0, 100), (7, 3, 50), (20, 20, 0), (3, 0, 27)])
def test_right_or_wrong_has_the_interval_of_bonett_and_price(won, lost, same):
    n = won + lost + same
    found = mean_interval([1.0] * won + [-1.0] * lost + [0.0] * same, names(n))
    up, down = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    # Student's quantile and n + 1 degrees in the variance, where they have the normal one and n + 2.
    half = stats.t.ppf(0.975, n - 1) * math.sqrt((up + down - (up - down) ** 2) / (n + 1))
    assert found.mean == pytest.approx((won - lost) / n)
    assert (found.low, found.high) == pytest.approx((up - down - half, up - down + half))
    assert found.low < 0 < found.high or won != lost


def test_the_interval_of_other_scores_is_students_on_two_documents_more():
    values = np.random.default_rng(0).normal(0.3, 1.0, 80)
    found = mean_interval(values.tolist(), names(80))
    more = [*values, np.abs(values).max(), -np.abs(values).max()]
    half = stats.t.ppf(0.975, 79) * np.std(more, ddof=1) / math.sqrt(82)
    expected = (values.mean(), np.mean(more) - half, np.mean(more) + half)
    assert (found.mean, found.low, found.high) == pytest.approx(expected)


def test_clusters_count_as_one():
    # Ten copies of each of eight documents carry the information of eight, not of eighty.
    single = np.random.default_rng(3).normal(size=8)
    copied, keys = np.repeat(single, 10).tolist(), [str(i) for i in range(8) for _ in range(10)]
    alone = mean_interval(single.tolist(), names(8))
    together = mean_interval(copied, keys)
    apart = mean_interval(copied, names(80))
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high))
    assert apart.high - apart.low < 0.5 * (together.high - together.low)


def test_a_weight_is_so_many_documents():
    once = mean_interval([0.5, -0.25, 1.5], ["a", "b", "c"], [3, 1, 2])
    spelled = mean_interval([0.5, 0.5, 0.5, -0.25, 1.5, 1.5], list("aaabcc"))
    assert (once.mean, once.low, once.high) == pytest.approx((spelled.mean, spelled.low, spelled.high))


def test_one_cluster_has_no_interval():
    for values, keys in (([0.5], ["a"]), ([1.0, 0.0, 1.0], ["a"] * 3)):
        found = mean_interval(values, keys)
        assert (found.low, found.high) == (-math.inf, math.inf)
    assert mean_interval([1.0, 0.0, 1.0], ["a"] * 3).mean == pytest.approx(2 / 3)
    assert mean_of_means([([0.5], ["a"]), ([0.1] * 30, names(30))]).low == -math.inf


def draw(kind, rng, *shape):
    """Scores of mean zero."""
    if kind == "normal":
        return rng.normal(size=shape)
    if kind == "t3":
        return rng.standard_t(3, size=shape)
    if kind == "skewed":
        return 1 - rng.exponential(size=shape)
    changed = 0.5 if kind == "answers" else 0.05
    which = rng.random(shape)
    return (which < changed / 2).astype(float) - (which > 1 - changed / 2)


@pytest.mark.parametrize("documents", [30, 100])
@pytest.mark.parametrize("kind", ["normal", "t3", "skewed", "answers", "few answers"])
def test_intervals_cover(kind, documents):
    found = [mean_interval(v.tolist(), names(documents)) for v in draw(kind, np.random.default_rng(5), 300, documents)]
    assert sum(f.low <= 0 <= f.high for f in found) >= 0.92 * 300


def test_the_mean_of_means_covers():
    rng = np.random.default_rng(6)
    hits = 0
    for _ in range(200):
        parts = [(draw("skewed", rng, n).tolist(), names(n)) for n in (20, 60, 200)]
        found = mean_of_means(parts)
        hits += found.low <= 0 <= found.high
        assert found.mean == pytest.approx(np.mean([np.mean(v) for v, _ in parts]))
    assert hits >= 0.92 * 200


def test_the_ratio_of_perplexities_is_the_gain_per_token():
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 50, 40)
    base = tokens * rng.normal(4, 0.2, 40)
    top = base - tokens * rng.normal(0.1, 0.05, 40)
    ratio = perplexity_against(top.tolist(), base.tolist(), tokens.tolist())
    perplexity = [math.exp(x.sum() / tokens.sum()) for x in (top, base)]
    assert ratio["mean"] == pytest.approx(perplexity[0] / perplexity[1])
    assert ratio["low"] < ratio["mean"] < ratio["high"] < 1
    alone = perplexity_against([1.0, 2.0], [2.0, 3.0], [1, 1], [7, 7])
    assert alone == {"mean": pytest.approx(math.exp(-1)), "low": None, "high": None}
    gain = mean_interval(((base - top) / tokens).tolist(), names(40), tokens.tolist())
    assert (ratio["low"], ratio["high"]) == pytest.approx((math.exp(-gain.high), math.exp(-gain.low)))


@pytest.mark.parametrize(("won", "lost"), [(1, 0), (5, 0), (8, 3), (3, 8), (60, 41), (20, 20)])
def test_right_or_wrong_is_the_exact_one_sided_mcnemar_test(won, lost):
    differences = [1.0] * won + [-1.0] * lost + [0.0] * 30
    random.Random(0).shuffle(differences)
    expected = stats.binomtest(won, won + lost, 0.5, alternative="greater").pvalue
    for scale in (1, 100):
        found = paired_test([scale * d for d in differences], names(len(differences)))
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-10, 1e6])
@pytest.mark.parametrize("seed", range(6))
def test_few_sign_flips_are_listed(seed, scale):
    rng = random.Random(seed)
    values = [rng.choice([rng.gauss(0.4, 1), 0.0, 0.1, -0.3]) for _ in range(10)]
    flips = listed_sign_flips([v for v in values if v]) if any(values) else 1.0
    found = paired_test([scale * v for v in values], names(10))
    # The bootstrap may ask for more, never for less; the unit of the scores changes nothing.
    assert found >= flips - 1e-12
    assert found == pytest.approx(paired_test(values, names(10)), abs=1e-12)


def studentised(values):
    return sum(values) / math.sqrt(sum((v - np.mean(values)) ** 2 for v in values))


@pytest.mark.parametrize("seed", range(3))
def test_other_scores_pass_both_counts(seed):
    rng = np.random.default_rng(seed)
    values = 0.4 - 0.5 * (rng.exponential(size=40) - 0.5)
    flips = [abs(values) @ (rng.integers(0, 2, 40) * 2 - 1) >= values.sum() for _ in range(4000)]
    # One more document that lost as much as any changed, against clusters drawn around the mean.
    bound = (values.sum() - abs(values).max()) / math.sqrt(((values - values.mean()) ** 2).sum())
    drawn = [studentised(rng.choice(values - values.mean(), 40)) >= bound for _ in range(4000)]
    assert paired_test(values, names(40)) == pytest.approx(max(np.mean(flips), np.mean(drawn)), abs=0.02)


def test_a_sure_gain_has_the_smallest_p():
    values = [1 + i / 100 for i in range(60)]
    assert paired_test(values, names(60), draws=1000) == 1 / 1001
    assert paired_test(values, names(60), draws=1000) == paired_test(values, names(60), draws=1000)
    # All differences equal: the flips alone decide.
    assert paired_test([0.3] * 12, names(12)) == pytest.approx(0.5**12)


@pytest.mark.parametrize("candidates", [1, 10])
@pytest.mark.parametrize("kind", ["normal", "skewed", "answers", "few answers"])
def test_the_best_of_many_null_candidates_passes_no_more_often_than_the_level(kind, candidates):
    rng = np.random.default_rng(7)
    passed, naive = 0, 0
    for _ in range(200):
        gains = draw(kind, rng, 60, candidates)
        best = int(gains.mean(0).argmax())
        passed += paired_test(gains, names(60), picked=best, draws=500) <= 0.05
        naive += paired_test(gains[:, best], names(60), draws=500) <= 0.05
    assert passed <= 0.08 * 200
    if candidates > 1 and kind == "answers":
        assert naive > 0.15 * 200


def test_candidates_that_are_copies_cost_nothing():
    values = draw("answers", np.random.default_rng(8), 80) * 0.0 + np.array([1.0] * 14 + [-1.0] * 4 + [0.0] * 62)
    alone = paired_test(values, names(80))
    copies = paired_test(np.stack([values] * 5, 1), names(80), picked=3)
    assert copies == pytest.approx(alone, abs=0.005)
    others = np.concatenate([values[:, None], draw("answers", np.random.default_rng(9), 80, 9)], 1)
    assert 2 * alone < paired_test(others, names(80)) <= 10 * alone + 0.005


def test_weights_decide_the_sign():
    gains = [0.2] * 30 + [-0.1] * 30
    light, heavy = [1.0] * 60, [1.0] * 30 + [10.0] * 30
    assert paired_test(gains, names(60), light) < 0.05
    assert paired_test(gains, names(60), heavy) > 0.95


def test_signs_of_a_cluster_flip_together():
    # Four documents that say the same are one witness.
    assert paired_test([1, 1, 1, 1], ["a"] * 4) == 0.5
    assert paired_test([1, 1, 1, 1], names(4)) == 1 / 16
    # Differences that cancel inside a cluster are no difference.
    assert paired_test([1, -1], ["a", "a"]) == 1.0
    assert paired_test([0, 0, 0], names(3)) == 1.0


def test_mcnemar():
    base, other = [1, 1, 0, 0, 0, 0, 0, 1], [1, 0, 1, 1, 1, 1, 0, 1]
    p = pytest.approx(stats.binomtest(4, 5, 0.5).pvalue)
    assert (mcnemar(base, other), mcnemar(other, base)) == ((4, 1, p), (1, 4, p))
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


@pytest.mark.parametrize(("documents", "level"), [(25, 0.05 / 24), (75, 0.05 / 2), (300, 0.05)])
def test_the_gain_that_can_be_found_is_found_so_often(documents, level):
    gain = detectable_gain(documents, level)
    rng = np.random.default_rng(0)
    which = rng.random((2000, documents))
    won, lost = (which < gain + 0.02).sum(1), (which > 0.98).sum(1)
    power = np.mean(stats.binom.sf(won - 1, won + lost, 0.5) <= level)
    assert 0.76 < power < 0.9
    assert detectable_gain(3, 0.001) == 1


@pytest.mark.parametrize(("documents", "level"), [(30, 0.025), (60, 0.05 / 12), (100, 0.05)])
def test_the_gain_of_a_text_that_can_be_found_is_found_so_often(documents, level):
    rng, found = np.random.default_rng(0), 0
    for gains in rng.normal(detectable_effect(documents, level), 1, (150, documents)):
        found += paired_test(3 * gains, names(documents), [7.0] * documents, draws=1000) <= level
    assert 0.7 < found / 150 < 0.9


@pytest.mark.parametrize("call", [mean_interval, paired_test])
@pytest.mark.parametrize(
    ("values", "keys", "error", "said"),
    [
        ([], [], DataError, "empty"),
        ([1, 2, 3], ["a", "b"], DataError, "3 scores but 2"),
        ([1, math.nan, 2], names(3), NumericError, "1 of 3"),
        ([math.inf, -math.inf, 2], names(3), NumericError, "2 of 3"),
    ],
)
def test_bad_input(call, values, keys, error, said):
    with pytest.raises(error, match=said):
        call(values, keys)


def test_one_draw_has_no_interval_and_equal_draws_add_nothing():
    values = np.random.default_rng(0).normal(size=50)
    plain = mean_interval(values.tolist(), names(50))
    assert mean_interval(values.tolist(), names(50), draws=[0.1]).low == -math.inf
    equal = mean_interval(values.tolist(), names(50), draws=[0.1, 0.1, 0.1])
    assert (equal.mean, equal.low, equal.high) == pytest.approx((plain.mean, plain.low, plain.high))


@pytest.mark.parametrize("draws", [3, 10])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5])
def test_an_interval_over_random_draws_covers_the_mean_over_all_of_them(draws, spread):
    """Every draw has an effect of its own, and one on each document; what is wanted is the mean over draws and documents."""
    rng, covered = np.random.default_rng(1), 0
    for _ in range(400):
        each = rng.normal(0, 1, (1, 60)) + rng.normal(0, spread, (draws, 1)) + rng.normal(0, 0.5, (draws, 60))
        found = mean_interval(each.mean(0).tolist(), names(60), draws=each.mean(1).tolist())
        covered += found.low <= 0 <= found.high
    assert covered / 400 >= 0.93
