"""Scores per kind of document, the table to choose by, and the wall between reference and reported."""

import math

import pytest

from freemoe.core.errors import DataError, NumericError, SplitError
from freemoe.domain_experts.select.scores import ScoreTable
from freemoe.evals.engine.evaluator import DocumentScore, Evaluator
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document, FrozenChoice, ReferenceSplit, ReportedSplit
from tests.tiny import tiny_model, tiny_tokenizer


def split_of(count):
    return ReferenceSplit(tuple(Document("t", str(i), f"k{i}", "target", f"{i}?", (" a",), 0) for i in range(count)))


class Graded:
    """A task that says what it was asked."""

    metric = "acc"

    def __init__(self):
        self.asked = []

    def grade(self, document, responses):
        self.asked.append((document.id, list(responses)))
        if document.kind in ("generate", "code"):
            return {"acc": float(len(responses[0]) % 2), "other": 9.0}
        best = max(range(len(responses)), key=lambda i: responses[i][0])
        return {"acc": float(best == document.gold), "other": 9.0}


@pytest.fixture(scope="module")
def scorer():
    return Scorer(tiny_model("llama"), tiny_tokenizer())


def documents():
    return [
        Document("q", "0", "k0", "choice", "One?", (" yes", " no", " maybe"), 2),
        Document("q", "1", "k1", "text", "", ("some text",)),
        Document("q", "2", "k2", "generate", "Two?", reference=" deux", until=("\n",), max_new_tokens=5),
        Document("q", "3", "k3", "target", "Three?", (" trois",), 0),
        Document("q", "4", "k4", "choice", "Four?", (" a", " b"), 0),
        Document("q", "5", "k5", "generate", "Five?", reference=" cinq", until=("x",), max_new_tokens=3),
    ]


def test_every_kind_is_scored_in_order(scorer):
    task = Graded()
    rows = documents()
    found = Evaluator(scorer, {"q": task}, gold=True).score(rows)
    assert len(found) == 6
    asked = dict(task.asked)
    assert set(asked) == {"0", "2", "3", "4", "5"}
    for i, document in enumerate(rows):
        if document.kind in ("choice", "target"):
            alone = scorer.loglikelihoods([(document.prompt, a) for a in document.answers])
            assert [r[0] for r in asked[document.id]] == pytest.approx([a[0] for a in alone], abs=1e-4)
            assert found[i].loglikelihood == pytest.approx(alone[document.gold][0], abs=1e-4)
            assert found[i].tokens == len(document.answers[document.gold])
            best = max(range(len(alone)), key=lambda k: alone[k][0])
            assert found[i].value == float(best == document.gold)
    total, tokens = scorer.score([scorer.text_pair(scorer.encode("some text"))])[0][::2]
    assert (found[1].value, found[1].tokens) == (pytest.approx(total / tokens, abs=1e-4), 9)
    for i in (2, 5):
        text = scorer.generate([rows[i].prompt], rows[i].until, rows[i].max_new_tokens)
        assert asked[rows[i].id] == text
        assert found[i].value == float(len(text[0]) % 2)
        gold = scorer.loglikelihoods([(rows[i].prompt, rows[i].reference)])[0][0]
        assert found[i].loglikelihood == pytest.approx(gold, abs=1e-4)
        assert found[i].tokens == 5


@pytest.mark.parametrize("number", [0, 2])
def test_a_metric_that_is_no_number_is_named(scorer, number, monkeypatch):
    task = Graded()
    monkeypatch.setattr(task, "grade", lambda document, responses: {"acc": math.nan})
    with pytest.raises(NumericError, match=f"The metric of 'q' is NaN for its document '{number}'"):
        Evaluator(scorer, {"q": task}).score([documents()[1], documents()[number]])


def test_gold_is_scored_only_when_asked(scorer):
    (found,) = Evaluator(scorer, {"q": Graded()}).score(documents()[2:3])
    assert math.isnan(found.loglikelihood)
    assert found.tokens == 0


# ----------------------------------------------------------------------- table


def counting(scores):
    """A table's compute that remembers what it was asked: ``{candidate: values}``."""
    asked = []

    def compute(candidate, numbers):
        asked.append((candidate, list(numbers)))
        return [DocumentScore(scores[candidate][i], -2.0 * (i + 1), 2) for i in numbers]

    return compute, asked


def test_no_document_is_scored_twice():
    compute, asked = counting({"base": [0.0] * 6, "a": [1.0] * 6})
    table = ScoreTable(split_of(6), compute)
    assert [s.value for s in table.document_scores("a", [0, 2])] == [1.0, 1.0]
    table.document_scores("a", [2, 0])
    assert asked == [("a", [0, 2])]
    table.document_scores("a", [2, 3, 0, 5])
    table.paired_gains("a", range(6))
    table.paired_gains("a", range(6))
    assert asked == [("a", [0, 2]), ("a", [3, 5]), ("a", [1, 4]), ("base", [0, 1, 2, 3, 4, 5])]
    assert table.content_keys == [f"k{i}" for i in range(6)]


def test_gains_are_paired_and_in_order():
    compute, _ = counting({"base": [0.0, 1.0, 0.0, 1.0], "a": [1.0, 0.0, 0.0, 1.0]})
    table = ScoreTable(split_of(4), compute)
    assert table.paired_gains("a", [3, 0, 1]) == [0.0, 1.0, -1.0]
    assert table.paired_gains("base", range(4)) == [0.0] * 4
    assert table.objective_values("a", [1, 0]) == [0.0, 1.0]
    assert table.objective_values("a", [1, 0], "loglikelihood") == [-2.0, -1.0]


def test_the_likelihood_objective_needs_gold_answers():
    table = ScoreTable(split_of(2), lambda c, n: [DocumentScore(1.0, math.nan, 0) for _ in n])
    assert table.objective_values("a", [0, 1]) == [1.0, 1.0]
    with pytest.raises(DataError, match="gold answers"):
        table.objective_values("a", [0, 1], "loglikelihood")


def test_reported_documents_cannot_make_a_table():
    reported = ReportedSplit(split_of(3).documents)
    compute, asked = counting({"base": [0.0] * 3})
    for wrong in (reported, reported.open(FrozenChoice("x")), split_of(3).documents, None):
        with pytest.raises(SplitError, match="ReferenceSplit"):
            ScoreTable(wrong, compute)
    assert asked == []


def test_reported_documents_open_for_a_frozen_choice_only():
    reported = ReportedSplit(split_of(3).documents)
    for wrong in (None, "digest", True, split_of(1)):
        with pytest.raises(SplitError, match="FrozenChoice"):
            reported.open(wrong)
    assert reported.open(FrozenChoice("digest")) == split_of(3).documents
    assert "k0" not in repr(reported)


def test_a_compute_that_loses_documents_is_noticed():
    table = ScoreTable(split_of(3), lambda c, n: [DocumentScore(1.0, 0.0, 1)] * (len(n) - 1))
    with pytest.raises(ValueError, match="zip"):
        table.document_scores("a", [0, 1, 2])
