"""Both searches on tables of made-up scores."""

import random

import pytest

from freemoe.core.errors import SplitError
from freemoe.domain_experts.select.scores import ReportedScores, ScoreTable
from freemoe.domain_experts.select.search import SEARCHES, exhaustive_search
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.tasks.documents import Document, ReferenceSplit


def table_of(rows, keys=None):
    """A table from ``{candidate: values}``, and the list of (candidate, document) it was asked for."""
    count = len(rows["base"])
    documents = tuple(Document("t", str(i), keys[i] if keys else f"k{i}", "target", f"{i}") for i in range(count))
    asked = []

    def compute(candidate, numbers):
        asked.extend((candidate, i) for i in numbers)
        return [DocumentScore(rows[candidate][i], rows[candidate][i] * 3.0, 3) for i in numbers]

    return ScoreTable(ReferenceSplit(documents), compute), asked


def noise(rng, count, share):
    return [float(rng.random() < share) for _ in range(count)]


def candidates(seed, count=12, documents=200, lift=0.25):
    rng = random.Random(seed)
    rows = {"base": noise(rng, documents, 0.4)}
    for c in range(count):
        rows[f"c{c}"] = [v if rng.random() < 0.9 else float(rng.random() < 0.4) for v in rows["base"]]
    winner = f"c{rng.randrange(count)}"
    rows[winner] = [1.0 if rng.random() < lift else v for v in rows[winner]]
    return rows, winner


@pytest.mark.parametrize("seed", range(10))
def test_halving_finds_the_same_clear_winner_with_less_work(seed):
    rows, winner = candidates(seed)
    names = [n for n in rows if n != "base"]
    full, asked_full = table_of(rows)
    some, asked_some = table_of(rows)
    assert SEARCHES.get("exhaustive")(full, names, range(200), "accuracy", 0) == winner
    assert SEARCHES.get("halving")(some, names, range(200), "accuracy", 0) == winner
    assert len(asked_full) == 12 * 200
    assert len(asked_some) < 0.6 * len(asked_full)
    assert len(set(asked_some)) == len(asked_some)


def test_exhaustive_equals_the_largest_mean():
    rng = random.Random(0)
    rows = {n: [rng.random() for _ in range(30)] for n in ("base", "a", "b", "c", "d")}
    table, _ = table_of(rows)
    some = rng.sample(range(30), 11)
    means = {n: sum(rows[n][i] for i in some) for n in "abcd"}
    assert SEARCHES.get("exhaustive")(table, list("abcd"), some, "accuracy", 0) == max(means, key=means.get)


@pytest.mark.parametrize("name", ["exhaustive", "halving"])
def test_only_the_named_documents_are_looked_at(name):
    rows, _ = candidates(1, documents=120)
    table, asked = table_of(rows)
    inside = range(0, 120, 2)
    SEARCHES.get(name)(table, [n for n in rows if n != "base"], inside, "accuracy", 5)
    assert {i for _, i in asked} <= set(inside)


@pytest.mark.parametrize("name", ["exhaustive", "halving"])
@pytest.mark.parametrize(("count", "documents"), [(1, 1), (1, 50), (2, 3), (3, 5), (40, 10), (40, 17)])
def test_few_candidates_or_documents(name, count, documents):
    rng = random.Random(count)
    rows = {f"c{i}": [rng.random() for _ in range(documents)] for i in range(count)}
    rows["base"] = [0.0] * documents
    rows[f"c{count - 1}"] = [2.0] * documents
    table, _ = table_of(rows)
    names = [n for n in rows if n != "base"]
    assert SEARCHES.get(name)(table, names, range(documents), "accuracy", 0) == f"c{count - 1}"


@pytest.mark.parametrize("name", ["exhaustive", "halving"])
def test_among_equals_the_first_wins(name):
    rows = {"base": [0.0] * 40, **{f"c{i}": [1.0] * 40 for i in range(6)}}
    table, _ = table_of(rows)
    assert SEARCHES.get(name)(table, ["c4", "c2", "c0", "c1", "c3", "c5"], range(40), "accuracy", 0) == "c4"


def test_the_objective_is_what_decides():
    documents = tuple(Document("t", str(i), str(i), "target", "x") for i in range(4))
    rows = {"base": (0.0, -9.0), "right": (1.0, -8.0), "likely": (0.0, -1.0)}
    table = ScoreTable(ReferenceSplit(documents), lambda c, n: [DocumentScore(*rows[c], 1) for _ in n])
    assert exhaustive_search(table, ["right", "likely"], range(4), "accuracy") == "right"
    assert exhaustive_search(table, ["right", "likely"], range(4), "loglikelihood") == "likely"


@pytest.mark.parametrize("name", ["exhaustive", "halving"])
def test_reported_scores_are_refused(name):
    documents = tuple(Document("t", str(i), str(i), "target", "x") for i in range(40))
    table = ScoreTable(ReferenceSplit(documents), lambda c, n: ReportedScores(DocumentScore(1.0, 0.0, 1) for _ in n))
    with pytest.raises(SplitError, match="cannot choose"):
        SEARCHES.get(name)(table, ["a", "b", "c"], range(40), "accuracy", 0)


def test_halving_is_seeded():
    rows, _ = candidates(4, lift=0.0)
    names = [n for n in rows if n != "base"]
    asked = []
    for seed in (0, 0, 1):
        table, log = table_of(rows)
        SEARCHES.get("halving")(table, names, range(200), "accuracy", seed)
        asked.append(log)
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]
