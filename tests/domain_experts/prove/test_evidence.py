"""The rows of a report from made-up scores: who is scored under what, and what is counted."""

from functools import partial

import pytest
import torch

from freemoe.domain_experts.prove.evidence import domain_evidence, scatter_scores, where_off
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.summary import mean_scores, summarise_scores
from freemoe.evals.tasks.documents import Document
from freemoe.models.weights import find_weights
from tests.masks import mask_of
from tests.tiny import tiny_model


def documents(count, kind="target"):
    return [Document("t", str(i), f"k{i}", kind, f"{i}") for i in range(count)]


def scores(values, tokens=2):
    return [DocumentScore(float(v), -float(i), tokens) for i, v in enumerate(values)]


def test_summary_of_right_and_wrong():
    base, mine = scores([1, 0, 0, 1, 0]), scores([1, 1, 1, 0, 0])
    row = summarise_scores(mine, base, documents(5))
    assert row["score"] == pytest.approx(60)
    assert row["gain"]["mean"] == pytest.approx(20)
    assert (row["won"], row["lost"], row["mcnemar_p"], row["documents"]) == (2, 1, 1.0, 5)
    halves = summarise_scores(scores([0.5] * 5), base, documents(5))
    assert "won" not in halves
    assert halves["gain"]["mean"] == pytest.approx(10)


def test_copies_are_one_cluster():
    copies = [Document("t", str(i), "same", "target", "x") for i in range(20)]
    base, mine = scores([0] * 20), scores([1] * 10 + [0] * 10)
    row = summarise_scores(mine, base, copies)
    assert row["gain"] == {"mean": pytest.approx(50), "low": None, "high": None}
    assert row["clusters"] == 1


def test_mean_and_scatter():
    a, b = [DocumentScore(1.0, -2.0, 5)], [DocumentScore(0.0, -4.0, 5)]
    assert mean_scores([a, b]) == [DocumentScore(0.5, -3.0, 5)]
    default = scores([0, 0, 0])
    assert [s.value for s in scatter_scores([([2, 0], scores([7, 8]))], default)] == [8, 0, 7]
    assert [s.value for s in default] == [0, 0, 0]


def test_where_off():
    weights = find_weights(tiny_model("llama"))
    off = {weights[0].name: torch.arange(5), weights[8].name: torch.arange(3), weights[12].name: torch.arange(2)}
    cells = where_off(mask_of(off, weights), weights)
    assert [(c["layer"], c["sublayer"], c["off"]) for c in cells] == [
        (0, "attention", 5), (0, "mlp", 0), (1, "attention", 3), (1, "mlp", 2)
    ]  # fmt: skip
    assert sum(c["of"] for c in cells) == sum(w.size for w in weights)


def test_every_row_is_scored_under_its_own_expert():
    """Dicts stand for the masks of experts; a document is right where its table says so."""
    docs = documents(6)
    known = [0, 0, 0, 1, 1, 2]
    names = ["d/a", "d/b", "d/c"]
    experts = {name: partial(dict, who=name[-1]) for name in ("d/a", "d/b", "e/x")}
    right = {
        None: {0, 3}, "a": {0, 1, 4}, "b": {3, 4}, "x": {2, 5}, "control a 0": {1}, "control b 0": set(),
        "control a 1": {1, 2}, "control b 1": {4}, "cand": {1, 2, 3, 4}, "bad": set(),
    }  # fmt: skip
    # Routed: right, to the base, to another domain, to a subdomain whose expert was turned down, to a sibling.
    routes = [("d/a", "d/a", 0.9), ("base", "d/a", 0.1), ("e/x", "e/x", 0.8), ("d/c", "d/c", 0.7), ("d/a", "d/a", 0.9),
              ("e/x", "e/x", 0.6)]  # fmt: skip
    asked = []

    def score(unit, off, wanted):
        asked.append((unit, len(wanted)))
        who = off().get("who")
        found = [float(int(d.id) in right[who]) for d in wanted]
        return [DocumentScore(value, -1.0, 1, (("pass@10", value),)) for value in found]

    made = []
    candidates = {
        name: lambda who=who: made.append(who) or {"who": who} for name, who in (("good", "cand"), ("bad", "bad"))
    }
    found = domain_evidence(
        docs, known, names, routes, experts, dict.fromkeys(names, candidates),
        lambda name, r: {"who": f"control {name[-1]} {r}"}, 2, score,
    )  # fmt: skip
    rows = {k: [d[k] for d in found["documents"]] for k in ("base", "expert", "routed", "control", "oracle")}
    assert rows["base"] == [1, 0, 0, 1, 0, 0]
    # The sixth document's subdomain has no expert: the base.
    assert rows["expert"] == [1, 1, 0, 1, 1, 0]
    assert rows["routed"] == [1, 0, 1, 1, 1, 1]
    assert rows["control"] == [0, 1, 0.5, 0, 0.5, 0]
    # Per subdomain the best row, the base among them: a has cand (2 right), b cand (2), c a tie of nothing.
    assert rows["oracle"] == [0, 1, 1, 1, 1, 0]
    # Its documents chose it, so that an interval would say nothing.
    assert found["rows"]["oracle"]["gain"] == {"mean": pytest.approx(100 * 2 / 6), "low": None, "high": None}
    assert "mcnemar_p" not in found["rows"]["oracle"]
    assert found["rows"]["oracle"]["also"]["pass@10"] == {k: found["rows"]["oracle"][k] for k in ("score", "gain")}
    assert found["rows"]["control"]["seeds"] == pytest.approx([-100 / 6, 100 / 6])
    expert = found["rows"]["expert"]
    over, gain = expert["over_control"], expert["gain"]
    assert over["mean"] == pytest.approx(100 * (4 - 2) / 6)
    assert over["low"] < gain["low"] + over["mean"] - gain["mean"]
    assert made == ["cand", "bad"] * 3
    assert len(asked) == len(set(asked))
    assert expert["score"] == pytest.approx(100 * 4 / 6)
    assert [d["subdomain"] for d in found["documents"]] == [names[k] for k in known]
    assert [d["routed_to"] for d in found["documents"]] == [r[0] for r in routes]
    assert found["subdomains"]["d/b"]["candidates"] == {"good": 100.0, "bad": 0.0}
    assert found["subdomains"]["d/a"]["rows"]["expert"]["won"] == 1


def undivided_evidence(docs, score, candidates=(), fallback=True):
    """The rows of a domain with one subdomain, none of whose documents is routed."""
    count, routes = len(docs), [("base", "d/a", 0.0)] * len(docs)
    named = {"d/a": dict(candidates)}
    return domain_evidence(docs, [0] * count, ["d/a"], routes, {}, named, lambda name, r: {}, 0, score, fallback)


@pytest.mark.parametrize(("fallback", "expected"), [(True, [1, 1, 0]), (False, [0, 0, 1])])
def test_the_papers_oracle_has_no_base_to_fall_back_on(fallback, expected):
    """Eq. 7 takes the best band even where all are worse; each figure has its own best, as the papers' pass@10 has."""
    tens = {None: 0.0, "one": 0.5, "two": 1.0}
    right = {None: {0, 1}, "one": {2}, "two": set()}

    def score(unit, off, wanted):
        who = off().get("who")
        return [DocumentScore(float(int(d.id) in right[who]), -1.0, 1, (("pass@10", tens[who]),)) for d in wanted]

    candidates = {who: partial(dict, who=who) for who in ("one", "two")}
    found = undivided_evidence(documents(3), score, candidates, fallback)
    assert [d["oracle"] for d in found["documents"]] == expected
    assert found["rows"]["oracle"]["also"]["pass@10"]["score"] == 100.0


def test_the_oracle_of_tasks_with_different_figures_shows_those_that_all_have():
    def score(unit, off, wanted):
        also = {"0": (("acc_norm", 1.0), ("acc", 0.0)), "1": (("acc", 1.0),)}
        return [DocumentScore(1.0, -1.0, 1, also[d.id]) for d in wanted]

    found = undivided_evidence(documents(2), score, {"one": dict})
    assert {name: row["score"] for name, row in found["rows"]["oracle"]["also"].items()} == {"acc": 50.0}


def test_a_domain_of_two_tasks_has_the_rows_of_each():
    docs = [Document("s" if i > 1 else "t", str(i), f"k{i}", "target", "x") for i in range(5)]
    right = scores([1, 0, 1, 1, 1])
    one, two = (undivided_evidence(docs[:n], lambda unit, off, wanted: right[: len(wanted)]) for n in (2, 5))
    assert {task: rows["base"]["score"] for task, rows in two["tasks"].items()} == {"t": 50, "s": 100}
    assert one["tasks"] == {}
