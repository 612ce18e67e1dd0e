"""The guard: noise must not get through, a real gain must, and no document may both choose and test."""

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.null import table_of as table_of_gains
from freemoe.core.errors import DataError
from freemoe.domain_experts.select.choice import (
    CandidateVerdict,
    accept_candidate,
    adjust_verdicts,
    judge_fitted,
    judge_winner,
    required_documents,
    split_by_share,
    split_folds,
)
from freemoe.domain_experts.select.search import exhaustive_search
from freemoe.evals.statistics import detectable_gain, paired_test
from tests.domain_experts.select.test_search import table_of


def null_rows(rng, documents=120, count=10):
    """Candidates that flip answers of the base at random, as often right as wrong."""
    rows = {"base": [float(rng.random() < 0.5) for _ in range(documents)]}
    for c in range(count):
        rows[f"c{c}"] = [float(rng.random() < 0.5) if rng.random() < 0.4 else v for v in rows["base"]]
    return rows


@pytest.mark.parametrize("method", ["exhaustive", "halving"])
def test_noise_is_accepted_no_more_often_than_alpha(method):
    rng, names = random.Random(0), [f"c{i}" for i in range(10)]
    accepted, naive = 0, 0
    for trial in range(100):
        table, _ = table_of(null_rows(rng))
        verdict = judge_winner(table, "wanda", names, method, "accuracy", trial)
        ((judged,),) = adjust_verdicts([[verdict]])
        accepted += accept_candidate([judged], 0.05) is not None
        # The papers' way: the winner tested as if nobody had picked it.
        naive += paired_test(table.paired_gains(verdict.candidate, range(120)), table.content_keys) <= 0.05
    assert accepted <= 0.08 * 100
    assert naive > 0.12 * 100


def test_the_verdict_by_hand():
    rows, names = null_rows(random.Random(4), documents=40, count=4), ["c0", "c1", "c2", "c3"]
    table, _ = table_of(rows)
    gain = {n: [a - b for a, b in zip(rows[n], rows["base"], strict=True)] for n in names}
    best = max(names, key=lambda n: sum(gain[n]))
    verdict = judge_winner(table, "wanda", names, "exhaustive", "accuracy", 9)
    assert (verdict.metric, verdict.candidate, verdict.tested, verdict.holm) == ("wanda", best, 40, None)
    assert verdict.gain == pytest.approx(sum(gain[best]) / 40)
    whole = np.array([gain[n] for n in names]).T
    assert verdict.p == paired_test(whole, table.content_keys, picked=names.index(best), seed=9)
    cheap = judge_winner(table, "wanda", names, "halving", "accuracy", 9)
    assert cheap.p == min(1.0, 4 * paired_test(table.paired_gains(cheap.candidate, range(40)), table.content_keys))


def test_the_test_is_on_the_reported_figure():
    table, _ = table_of(null_rows(random.Random(5), documents=40, count=2))
    by_accuracy, by_likelihood = (
        judge_winner(table, "wanda", ["c0"], "exhaustive", objective, 0) for objective in ("accuracy", "loglikelihood")
    )
    assert by_accuracy == by_likelihood


def test_documents_that_are_all_the_same_prove_nothing():
    table, _ = table_of({"base": [0.0] * 10, "c0": [1.0] * 10}, ["one"] * 10)
    verdict = judge_winner(table, "wanda", ["c0"], "exhaustive", "accuracy", 0)
    assert (verdict.p, verdict.tested) == (0.5, 10)


def test_a_fitted_candidate_is_judged_on_its_guard_only():
    table, asked = table_of({"base": [0.0] * 10, "fit": [1.0] * 4 + [0.0] * 6})
    verdict = judge_fitted(table, "fit", [2, 3, 8, 9], 0)
    assert {i for _, i in asked} == {2, 3, 8, 9}
    assert (verdict.gain, verdict.tested, verdict.p) == (0.5, 4, 0.25)
    with pytest.raises(DataError, match="empty"):
        judge_fitted(table, "fit", [], 0)


def text_table(gains, tokens):
    return table_of({"base": [-3.0] * len(gains), "fit": [gain - 3.0 for gain in gains]}, tokens=tokens)[0]


def test_text_is_weighed_by_its_tokens_in_search_and_test():
    # Short documents gain, long ones lose: per token the candidate is worse.
    table = text_table([0.3] * 30 + [-0.1] * 30, [10] * 30 + [200] * 30)
    assert exhaustive_search(table, ["base", "fit"], range(60), "accuracy") == "base"
    verdict = judge_fitted(table, "fit", range(60), 0)
    assert verdict.gain == pytest.approx((0.3 * 10 - 0.1 * 200) / 210)
    assert verdict.p > 0.9


def test_a_few_ruined_documents_are_not_hidden_by_a_mean():
    table = text_table([0.5] * 90 + [-1.5] * 10, [100] * 100)
    verdict = judge_fitted(table, "fit", range(100), 0)
    assert verdict.gain == pytest.approx(0.3)
    assert verdict.much_worse == pytest.approx(0.1)
    assert accept_candidate([replace(verdict, holm=0.001)], 0.05) is None
    assert accept_candidate([replace(verdict, holm=0.001, much_worse=0.05)], 0.05) is not None


def assert_all_parted_and_no_key(parts, keys):
    assert sorted(i for part in parts for i in part) == list(range(len(keys)))
    assert sum(len({keys[i] for i in part}) for part in parts) == len(set(keys))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [2, 3, 7])
def test_folds_part_all_documents_and_no_key(seed, count):
    rng = random.Random(seed)
    keys = [f"k{rng.randrange(40)}" for _ in range(rng.randrange(1, 120))]
    parts = split_folds(keys, count, seed)
    assert_all_parted_and_no_key(parts, keys)
    assert all(part and part == sorted(part) for part in parts)
    assert parts == split_folds(keys, count, seed)
    assert len(parts) == min(count, len(set(keys)))
    if len(keys) > 60:
        assert max(map(len, parts)) - min(map(len, parts)) <= max(map(keys.count, keys))


@pytest.mark.parametrize("seed", range(8))
def test_shares_part_all_documents_and_no_key(seed):
    rng = random.Random(seed)
    keys = [f"k{rng.randrange(60)}" for _ in range(100)]
    parts = split_by_share(keys, [0.4, 0.3], seed)
    assert_all_parted_and_no_key(parts, keys)
    for part, share in zip(parts, (40, 30, 30), strict=True):
        assert abs(len(part) - share) <= max(map(keys.count, keys))
    assert parts == split_by_share(keys, [0.4, 0.3], seed)
    assert parts != split_by_share(keys, [0.4, 0.3], seed + 1)


def test_shares_of_distinct_documents_are_exact():
    for count, sizes, seed in ((50, [20, 15, 15], 0), (10, [4, 3, 3], 3)):
        assert list(map(len, split_by_share(list(map(str, range(count))), [0.4, 0.3], seed))) == sizes
    assert split_by_share([], [0.4], 0) == [[], []]


def verdict(p, gain=0.1, candidate="c", holm=None):
    return CandidateVerdict("wanda", candidate, gain, p, 50, holm=holm)


def test_adjusting_spans_all_subdomains():
    found = adjust_verdicts([[verdict(0.01), verdict(0.04)], [], [verdict(0.02)]])
    assert [[v.holm for v in g] for g in found] == [pytest.approx([0.03, 0.04]), [], pytest.approx([0.04])]
    assert [[v.p for v in g] for g in found] == [[0.01, 0.04], [], [0.02]]
    assert adjust_verdicts([]) == []


def test_accepting():
    weak, strong = verdict(0.01, 0.1, "weak", 0.02), verdict(0.02, 0.3, "strong", 0.04)
    # Their gains are of different documents: the smaller p-value decides, and among equals the larger gain.
    assert accept_candidate([weak, strong], 0.05).candidate == "weak"
    assert accept_candidate([weak, replace(strong, holm=0.02)], 0.05).candidate == "strong"
    assert accept_candidate([weak, strong], 0.03).candidate == "weak"
    assert accept_candidate([weak, strong], 0.01) is None
    assert accept_candidate([verdict(0.05, 0.2, holm=0.05)], 0.05) is not None
    no_gain, loss, unadjusted = verdict(0.001, 0.0, holm=0.001), verdict(0.001, -0.2, holm=0.001), verdict(0.001, 0.2)
    for turned_down in ([no_gain], [loss], [unadjusted], []):
        assert accept_candidate(turned_down, 0.05) is None


@pytest.mark.parametrize(("tests", "alpha"), [(1, 0.05), (1, 0.5), (2, 0.05), (16, 0.05), (7, 0.01), (1, 0.9)])
def test_enough_documents_can_pass_one_of_the_tests(tests, alpha):
    def accepted(documents):
        sure = judge_fitted(table_of_gains(np.ones((documents, 1))), "c0", range(documents), 0)
        return accept_candidate(adjust_verdicts([[sure], [verdict(1.0)] * (tests - 1)])[0], alpha) is not None

    needed = required_documents(tests, alpha)
    assert accepted(needed)
    assert needed == 1 or not accepted(needed - 1)


@pytest.mark.parametrize(
    ("method", "candidates", "alike"), [("exhaustive", 1, True), ("halving", 10, False), ("exhaustive", 10, True)]
)
def test_the_gain_said_beforehand_is_found_four_times_in_five(method, candidates, alike):
    documents, level = 100, 0.05 / 12
    counted = candidates if method == "halving" else 1
    gain, names, found = detectable_gain(documents, level / counted), [f"c{i}" for i in range(candidates)], 0
    for trial in range(200):
        which = np.random.default_rng(trial).random((documents, candidates))
        gains = (which < 0.02).astype(float) - (which > 0.98)
        gains[:, 0] += (which[:, 0] >= 0.02) & (which[:, 0] < 0.02 + gain)
        if alike:
            gains[:] = gains[:, :1]
        found += judge_winner(table_of_gains(gains), "wanda", names, method, "accuracy", trial).p <= level
    # The noise of 200 draws is three points; of unrelated candidates the test asks for more, as the other end says.
    assert 0.72 < found / 200 < 0.9
