"""Both searches on tables of made-up scores."""

import random

import pytest

from freemoe.core.errors import SplitError
from freemoe.domain_experts.select.scores import ReportedScores, ScoreTable
from freemoe.domain_experts.select.search import SEARCHES, exhaustive_search
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.tasks.documents import Document, ReferenceSplit


def split_of(keys, kind="target"):
    return ReferenceSplit(tuple(Document("t", str(i), key, kind, f"{i}") for i, key in enumerate(keys)))


def table_of(rows, keys=None, tokens=None):
    """A table from ``{candidate: values}``, and the list of (candidate, document) it was asked for.

    Where numbers of tokens are given, the documents are text.
    """
    keys = keys or [f"k{i}" for i in range(len(rows["base"]))]
    length, asked = tokens or [3] * len(keys), []

    def compute(candidate, numbers):
        asked.extend((candidate, i) for i in numbers)
        return [DocumentScore(rows[candidate][i], rows[candidate][i] * length[i], length[i]) for i in numbers]

    return ScoreTable(split_of(keys, "text" if tokens else "target"), compute), asked


def search(name, rows, inside=None, seed=0):
    """What a search takes of the rows above the base's, and what it asked for."""
    table, asked = table_of(rows)
    names = [n for n in rows if n != "base"]
    return SEARCHES.get(name)(table, names, inside or range(len(rows["base"])), "accuracy", seed), asked


both_searches = pytest.mark.parametrize("name", ["exhaustive", "halving"])


def candidates(seed, documents=200, lift=0.25):
    """Twelve that are almost the base, and the one that is better where something is lifted."""
    rng = random.Random(seed)
    rows = {"base": [float(rng.random() < 0.4) for _ in range(documents)]}
    for c in range(12):
        rows[f"c{c}"] = [v if rng.random() < 0.9 else float(rng.random() < 0.4) for v in rows["base"]]
    winner = f"c{rng.randrange(12)}"
    rows[winner] = [1.0 if rng.random() < lift else v for v in rows[winner]]
    return rows, winner


@pytest.mark.parametrize("seed", range(10))
def test_halving_finds_the_same_clear_winner_with_less_work(seed):
    rows, winner = candidates(seed)
    (full, all_asked), (halved, asked) = (search(name, rows) for name in ("exhaustive", "halving"))
    assert full == halved == winner
    assert len(all_asked) == 12 * 200
    assert len(set(asked)) == len(asked) < 0.6 * len(all_asked)


def test_exhaustive_equals_the_largest_mean():
    rng = random.Random(0)
    rows = {n: [rng.random() for _ in range(30)] for n in ("base", "a", "b", "c", "d")}
    some = rng.sample(range(30), 11)
    means = {n: sum(rows[n][i] for i in some) for n in "abcd"}
    assert search("exhaustive", rows, some)[0] == max(means, key=means.get)


@both_searches
def test_only_the_named_documents_are_looked_at(name):
    rows, _ = candidates(1, documents=120)
    inside = range(0, 120, 2)
    _, asked = search(name, rows, inside, seed=5)
    assert {i for _, i in asked} <= set(inside)


@both_searches
@pytest.mark.parametrize(("count", "documents"), [(1, 1), (1, 50), (2, 3), (3, 5), (40, 10), (40, 17)])
def test_few_candidates_or_documents(name, count, documents):
    rng = random.Random(count)
    rows = {f"c{i}": [rng.random() for _ in range(documents)] for i in range(count)}
    rows["base"] = [0.0] * documents
    rows[f"c{count - 1}"] = [2.0] * documents
    assert search(name, rows)[0] == f"c{count - 1}"


@both_searches
def test_among_equals_the_first_wins(name):
    assert search(name, {"base": [0.0] * 40, **{f"c{i}": [1.0] * 40 for i in (4, 2, 0, 1, 3, 5)}})[0] == "c4"


def test_the_objective_is_what_decides():
    rows = {"base": (0.0, -9.0), "right": (1.0, -8.0), "likely": (0.0, -1.0)}
    table = ScoreTable(split_of("abcd"), lambda c, n: [DocumentScore(*rows[c], 1) for _ in n])
    assert exhaustive_search(table, ["right", "likely"], range(4), "accuracy") == "right"
    assert exhaustive_search(table, ["right", "likely"], range(4), "loglikelihood") == "likely"


@both_searches
def test_reported_scores_are_refused(name):
    keys = [f"k{i}" for i in range(40)]
    table = ScoreTable(split_of(keys), lambda c, n: ReportedScores(DocumentScore(1.0, 0.0, 1) for _ in n))
    with pytest.raises(SplitError, match="cannot choose"):
        SEARCHES.get(name)(table, ["a", "b", "c"], range(40), "accuracy", 0)


def test_halving_is_seeded():
    rows, _ = candidates(4, lift=0.0)
    first, again, other = (search("halving", rows, seed=seed)[1] for seed in (0, 0, 1))
    assert first == again != other
