"""Rows of a table of results: a score, and its paired difference to the base with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.statistics import (
    HEAVY_LOSS,
    Interval,
    exponential,
    holm,
    mcnemar,
    mean_interval,
    mean_of_means,
    paired_test,
)
from freemoe.evals.tasks.documents import Document

ZERO = Interval(0.0, 0.0, 0.0)


def is_text(documents: Sequence[Document]) -> bool:
    """Whether the reported figure is perplexity rather than a share of right answers."""
    return bool(documents) and documents[0].kind == "text"


def reported_metric(scores: Sequence[DocumentScore], documents: Sequence[Document]) -> float:
    """The reported figure alone: per cent right, or perplexity per token over all documents."""
    if is_text(documents):
        return math.exp(-sum(s.loglikelihood for s in scores) / max(1, sum(s.tokens for s in scores)))
    return 100 * float(np.mean([s.value for s in scores]))


def mean_scores(draws: Sequence[Sequence[DocumentScore]]) -> list[DocumentScore]:
    """Scores averaged over random draws, document by document: the control's."""
    return [
        DocumentScore(
            float(np.mean([s.value for s in column])),
            float(np.mean([s.loglikelihood for s in column])),
            column[0].tokens,
            tuple((name, float(np.mean([dict(s.also)[name] for s in column]))) for name, _ in column[0].also),
        )
        for column in zip(*draws, strict=True)
    ]


def paired_gain(
    scores: Sequence[DocumentScore],
    base: Sequence[DocumentScore],
    documents: Sequence[Document],
    draws: Sequence[Sequence[DocumentScore]] = (),
    value: Callable[[DocumentScore], float] = lambda score: score.value,
) -> tuple[Interval, list[float]]:
    """Mean paired difference in points, of text in nats per token; and that of every random draw.

    ``draws``: where ``scores`` are the means over random draws, such as masks: the scores under each.
    """
    text = is_text(documents)
    weights, scale = ([max(1, s.tokens) for s in base], 1) if text else (None, 100)
    gains, *drawn = [[value(a) - value(b) for a, b in zip(row, base, strict=True)] for row in (scores, *draws)]
    means = [float(np.average(row, weights=weights)) for row in drawn]
    # Equal to the last digit of every likelihood: the base itself, whose difference to itself is known.
    same = all(list(row) == list(base) for row in draws or [scores])
    gain = ZERO if same else mean_interval(gains, [d.key for d in documents], weights, draws=means)
    return gain.scaled(scale), [mean * scale for mean in means]


def summarise_scores(
    scores: Sequence[DocumentScore],
    base: Sequence[DocumentScore],
    documents: Sequence[Document],
    draws: Sequence[Sequence[DocumentScore]] = (),
) -> dict[str, Any]:
    """One row of a table: the score, its paired gain over the base with a 95 % interval, items won and lost.

    Scores and gains of tasks are in per cent and points. Of text the score is perplexity, the gain is in nats per token, and
    ``ratio`` is the quotient of both perplexities: the same gain once more, so that one never rises where the other falls.
    Where ``scores`` are means over random ``draws``, ``seeds`` are the gains of each, and the interval is wide enough for other draws.
    """
    gain, seeds = paired_gain(scores, base, documents, draws)
    row: dict[str, Any] = {
        "score": reported_metric(scores, documents),
        "gain": gain.as_json(),
        "documents": len(scores),
        "clusters": len({d.key for d in documents}),
    }
    if draws:
        row["seeds"] = seeds
    text = is_text(documents)
    if text:
        row["ratio"] = exponential(gain.scaled(-1)).as_json()
        row["much_worse"] = float(np.mean([a.value - b.value < -HEAVY_LOSS for a, b in zip(scores, base, strict=True)]))
    if names := shared_figures([*scores, *base]):
        row["also"] = {name: _other_figure(name, scores, base, documents, draws) for name in names}
    if not text and all(s.value in (0.0, 1.0) for s in [*scores, *base]):
        won, lost, p = mcnemar([s.value for s in base], [s.value for s in scores])
        row |= {"won": won, "lost": lost, "mcnemar_p": p}
    return row


def two_sided_p(
    scores: Sequence[DocumentScore], base: Sequence[DocumentScore], documents: Sequence[Document], seed: int
) -> float:
    """Two-sided p-value of a row's mean gain, weighed as `summarise_scores` weighs it."""
    gains, keys = np.array([a.value - b.value for a, b in zip(scores, base, strict=True)]), [d.key for d in documents]
    weights = [max(1, s.tokens) for s in base] if is_text(documents) else None
    return min(1.0, 2 * min(paired_test(side, keys, weights, seed=seed) for side in (gains, -gains)))


def adjust_rows(domains: Sequence[Mapping[str, Any]]) -> None:
    """Add Holm's adjustment over every compared row of a call to its rows: twenty comparisons find one by chance."""
    compared = [row for domain in domains for row in domain["rows"].values() if "p" in row]
    for row, p in zip(compared, holm([row["p"] for row in compared]), strict=True):
        row["holm"] = p


def average_rows(domains: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Way -> mean score over the domains that are scored in points, each counting the same, and its gain over the first way.

    ``domains``: of an evaluation's result, with their documents. Gives empty for fewer than two such domains.
    """
    scored = [d for d in domains if d["unit"] == "points"]
    if len(scored) < 2:
        return {}
    return {way: {**row, "domains": len(scored)} for way, row in mean_of_domains(scored).items()}


def mean_of_domains(domains: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Way -> mean score of one or more domains that are scored in points, and its gain over the first way."""
    first = next(iter(domains[0]["rows"]))
    found = {}
    for way in domains[0]["rows"]:
        # Where a way is the first one itself (`summarise_scores`), nothing is unknown of their difference.
        apart = [d for d in domains if way != first and d["rows"][way].get("gain") != ZERO.as_json()]
        parts = [([x[way] - x[first] for x in d["documents"]], [x["key"] for x in d["documents"]]) for d in apart]
        gain = mean_of_means(parts, len(domains) - len(parts)).scaled(100)
        score = sum(d["rows"][way]["score"] for d in domains) / len(domains)
        found[way] = {"score": score, "gain": gain.as_json()}
    return found


def _other_figure(
    name: str,
    scores: Sequence[DocumentScore],
    base: Sequence[DocumentScore],
    documents: Sequence[Document],
    draws: Sequence[Sequence[DocumentScore]],
) -> dict[str, Any]:
    """The same of another figure that all documents have: acc_norm beside acc, pass@10 from the samples of pass@1, text per word."""

    def value(score: DocumentScore) -> float:
        return dict(score.also)[name]

    if not is_text(documents):
        gain, _ = paired_gain(scores, base, documents, draws, value)
        return {"score": 100 * float(np.mean([value(s) for s in scores])), "gain": gain.as_json()}
    scores, base, *draws = (
        [DocumentScore(value(s), value(s) * d.words, d.words) for s, d in zip(row, documents, strict=True)]
        for row in (scores, base, *draws)
    )
    row = summarise_scores(scores, base, documents, draws)
    return {figure: row[figure] for figure in ("score", "gain", "ratio")}


def shared_figures(scores: Sequence[DocumentScore]) -> list[str]:
    """Names of the other figures that all scores have, in the order of the first one's."""
    return [name for name, _ in scores[0].also if all(name in dict(s.also) for s in scores)] if scores else []
