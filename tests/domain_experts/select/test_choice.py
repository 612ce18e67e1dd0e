"""The guard: noise must not get through, a real gain must, and no document may both choose and test."""

import random

import pytest

from freemoe.core.errors import DataError
from freemoe.domain_experts.select.choice import (
    Verdict,
    accept,
    adjust,
    best_case,
    cross_fit,
    enough,
    folds,
    held_out,
    shares,
)
from freemoe.domain_experts.select.scores import ScoreTable
from freemoe.domain_experts.select.search import SEARCHES
from freemoe.evals.statistics import paired_test
from tests.domain_experts.select.test_search import table_of

EXHAUSTIVE = SEARCHES.get("exhaustive")


def null_rows(rng, documents=120, count=10):
    """Candidates that flip answers of the base at random, as often right as wrong."""
    rows = {"base": [float(rng.random() < 0.5) for _ in range(documents)]}
    for c in range(count):
        rows[f"c{c}"] = [float(rng.random() < 0.5) if rng.random() < 0.4 else v for v in rows["base"]]
    return rows


def lifted(rng, rows, name, share):
    rows[name] = [1.0 if v == 0 and rng.random() < share else v for v in rows[name]]
    return rows


@pytest.mark.parametrize("method", ["exhaustive", "halving"])
def test_noise_is_accepted_no_more_often_than_alpha(method):
    rng = random.Random(0)
    accepted, naive = 0, 0
    for trial in range(200):
        table, _ = table_of(null_rows(rng))
        names = [f"c{i}" for i in range(10)]
        verdict = cross_fit(table, "wanda", names, SEARCHES.get(method), "accuracy", 2, trial)
        ((judged,),) = adjust([[verdict]])
        accepted += accept([judged], 0.05) is not None
        # The papers' way: the winner tested on what chose it.
        gains = table.gains(verdict.candidate, range(120))
        naive += paired_test(gains, table.keys) <= 0.05
    assert accepted <= 0.08 * 200
    assert naive > 0.12 * 200


def test_noise_in_several_subdomains_and_metrics():
    rng = random.Random(1)
    wrong = 0
    for trial in range(60):
        groups = []
        for _ in range(4):
            table, _ = table_of(null_rows(rng, documents=80, count=6))
            names = [f"c{i}" for i in range(6)]
            groups.append(
                [
                    cross_fit(table, m, part, EXHAUSTIVE, "accuracy", 2, trial)
                    for m, part in (("wanda", names[:3]), ("magnitude", names[3:]))
                ]
            )
        wrong += any(accept(g, 0.05) for g in adjust(groups))
    assert wrong <= 0.1 * 60


@pytest.mark.parametrize("count", [2, 5])
def test_a_real_gain_is_found(count):
    rng = random.Random(2)
    found = 0
    for trial in range(30):
        rows = lifted(rng, null_rows(rng, documents=150), "c7", 0.4)  # +20 points
        table, _ = table_of(rows)
        verdict = cross_fit(table, "wanda", [f"c{i}" for i in range(10)], EXHAUSTIVE, "accuracy", count, trial)
        ((judged,),) = adjust([[verdict]])
        choice = accept([judged], 0.05)
        found += choice is not None and choice.candidate == "c7"
        assert verdict.tested == 150
    assert found >= 27


def test_a_winner_is_tested_on_documents_that_did_not_choose_it():
    rng = random.Random(3)
    rows = null_rows(rng, documents=60)
    keys = [f"k{i // 2}" for i in range(60)]
    table, _ = table_of(rows, keys)
    seen = []

    def search(table, candidates, documents, objective, seed):
        seen.append(list(documents))
        return EXHAUSTIVE(table, candidates, documents, objective, seed)

    tested = []
    gains = table.gains
    table.gains = lambda c, d, o="accuracy": tested.append(list(d)) or gains(c, d, o)
    verdict = cross_fit(table, "wanda", ["c0", "c1", "c2"], search, "accuracy", 3, 0)
    assert len(seen) == 4
    assert seen[-1] == list(range(60))
    held = [d for d in tested if len(d) < 30]
    assert sorted(i for part in held for i in part) == list(range(60))
    for inside, outside in zip(seen[:3], held, strict=True):
        assert not {keys[i] for i in inside} & {keys[i] for i in outside}
        assert sorted(inside + outside) == list(range(60))
    assert verdict.tested == 60


def test_cross_fitting_by_hand():
    rows = null_rows(random.Random(4), documents=40, count=4)
    table, _ = table_of(rows)
    names = ["c0", "c1", "c2", "c3"]
    verdict = cross_fit(table, "wanda", names, EXHAUSTIVE, "accuracy", 2, 9)
    gain = {n: [a - b for a, b in zip(rows[n], rows["base"], strict=True)] for n in names}
    parts = folds(table.keys, 2, 9)
    total = 0.0
    for held, other in (parts, parts[::-1]):
        winner = max(names, key=lambda n: sum(gain[n][i] for i in other))
        total += sum(gain[winner][i] for i in held)
    assert verdict.gain == pytest.approx(total / 40)
    assert verdict.candidate == max(names, key=lambda n: sum(gain[n]))
    assert (verdict.metric, verdict.tested, verdict.holm) == ("wanda", 40, None)


def test_the_test_is_on_the_reported_figure():
    rows = null_rows(random.Random(5), documents=40, count=2)
    table, _ = table_of(rows)
    by_accuracy = cross_fit(table, "wanda", ["c0"], EXHAUSTIVE, "accuracy", 2, 0)
    by_likelihood = cross_fit(table, "wanda", ["c0"], EXHAUSTIVE, "loglikelihood", 2, 0)
    assert by_accuracy == by_likelihood


def test_documents_that_are_all_the_same_prove_nothing():
    rows = {"base": [0.0] * 10, "c0": [1.0] * 10}
    table, _ = table_of(rows, ["one"] * 10)
    verdict = cross_fit(table, "wanda", ["c0"], EXHAUSTIVE, "accuracy", 2, 0)
    assert (verdict.p, verdict.tested) == (1.0, 0)


def test_held_out_looks_at_the_guard_only():
    rows = {"base": [0.0] * 10, "fit": [1.0] * 4 + [0.0] * 6}
    table, asked = table_of(rows)
    verdict = held_out(table, "saliency", "fit", [2, 3, 8, 9], 0)
    assert {i for _, i in asked} == {2, 3, 8, 9}
    assert (verdict.gain, verdict.tested, verdict.p) == (0.5, 4, 0.25)
    with pytest.raises(DataError, match="empty"):
        held_out(table, "saliency", "fit", [], 0)


# ------------------------------------------------------------- folds and shares


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [2, 3, 7])
def test_folds_part_all_documents_and_no_key(seed, count):
    rng = random.Random(seed)
    keys = [f"k{rng.randrange(40)}" for _ in range(rng.randrange(1, 120))]
    parts = folds(keys, count, seed)
    assert sorted(i for p in parts for i in p) == list(range(len(keys)))
    owner = {}
    for n, part in enumerate(parts):
        assert part
        assert part == sorted(part)
        for i in part:
            assert owner.setdefault(keys[i], n) == n
    assert parts == folds(keys, count, seed)
    assert len(parts) == min(count, len(set(keys)))
    if len(keys) > 60:
        largest = max(keys.count(k) for k in keys)
        assert max(map(len, parts)) - min(map(len, parts)) <= largest


@pytest.mark.parametrize("seed", range(8))
def test_shares_part_all_documents_and_no_key(seed):
    rng = random.Random(seed)
    keys = [f"k{rng.randrange(60)}" for _ in range(100)]
    parts = shares(keys, [0.4, 0.3], seed)
    assert len(parts) == 3
    assert sorted(i for p in parts for i in p) == list(range(100))
    owner = {}
    for n, part in enumerate(parts):
        for i in part:
            assert owner.setdefault(keys[i], n) == n
    largest = max(keys.count(k) for k in keys)
    for part, share in zip(parts, (40, 30, 30), strict=True):
        assert abs(len(part) - share) <= largest
    assert parts == shares(keys, [0.4, 0.3], seed)
    assert parts != shares(keys, [0.4, 0.3], seed + 1)


def test_shares_of_distinct_documents_are_exact():
    keys = [str(i) for i in range(50)]
    assert list(map(len, shares(keys, [0.4, 0.3], 0))) == [20, 15, 15]
    assert list(map(len, shares(keys[:10], [0.4, 0.3], 3))) == [4, 3, 3]
    assert shares([], [0.4], 0) == [[], []]


# ---------------------------------------------------------------- adjust, accept


def verdict(p, gain=0.1, candidate="c", holm=None):
    return Verdict("wanda", candidate, gain, p, 50, holm)


def test_adjusting_spans_all_subdomains():
    groups = [[verdict(0.01), verdict(0.04)], [], [verdict(0.02)]]
    found = adjust(groups)
    assert [[v.holm for v in g] for g in found] == [
        [pytest.approx(0.03), pytest.approx(0.04)],
        [],
        [pytest.approx(0.04)],
    ]
    assert [[v.p for v in g] for g in found] == [[0.01, 0.04], [], [0.02]]
    assert adjust([]) == []


def test_accepting():
    weak, strong = verdict(0.01, 0.1, "weak", 0.02), verdict(0.02, 0.3, "strong", 0.04)
    assert accept([weak, strong], 0.05).candidate == "strong"
    assert accept([weak, strong], 0.03).candidate == "weak"
    assert accept([weak, strong], 0.01) is None
    assert accept([verdict(0.001, 0.0, holm=0.001)], 0.05) is None
    assert accept([verdict(0.001, -0.2, holm=0.001)], 0.05) is None
    assert accept([verdict(0.001, 0.2)], 0.05) is None
    assert accept([], 0.05) is None
    assert accept([verdict(0.05, 0.2, holm=0.05)], 0.05) is not None


# ------------------------------------------------------- what can be proven at all


@pytest.mark.parametrize("counts", [[[3], [40]], [[5, 60], [6, 60], [2, 4]], [[9, 9, 9]]])
def test_the_best_case_is_a_gain_on_every_document(counts):
    groups = []
    for group in counts:
        verdicts = []
        for n in group:
            table, _ = table_of({"base": [0.0] * n, "fit": [1.0] * n})
            verdicts.append(held_out(table, "saliency", "fit", range(n), 0))
        groups.append(verdicts)
    best = best_case(counts)
    assert [[v.holm for v in g] for g in adjust(groups)] == [[pytest.approx(p) for p in g] for g in best]
    # A document that did not gain makes no p-value of the build smaller.
    table, _ = table_of({"base": [0.0] * 3, "fit": [1.0, 1.0, 0.0]})
    groups[0][0] = held_out(table, "saliency", "fit", range(3), 0)
    if counts[0][0] == 3:
        assert all(v.holm >= p for g, b in zip(adjust(groups), best, strict=True) for v, p in zip(g, b, strict=True))


@pytest.mark.parametrize(("tests", "alpha"), [(1, 0.05), (1, 0.5), (2, 0.05), (16, 0.05), (7, 0.01), (1, 0.9)])
def test_enough_is_the_smallest_number_that_passes_alone(tests, alpha):
    needed = enough(tests, alpha)
    assert best_case([[needed] * tests])[0][0] <= alpha
    assert needed == 1 or best_case([[needed - 1] * tests])[0][0] > alpha


def test_the_table_is_one_of_reference_documents():
    table, _ = table_of({"base": [0.0]})
    assert isinstance(table, ScoreTable)
