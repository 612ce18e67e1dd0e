"""Rows of a table of results: a score, and its paired difference to the base with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from freemoe.evals.engine.evaluator import Score
from freemoe.evals.statistics import Interval, cluster_bootstrap, mcnemar, mean_of_bootstraps, ratio_bootstrap
from freemoe.evals.tasks.documents import Document


def is_text(documents: Sequence[Document]) -> bool:
    """Whether the reported figure is perplexity rather than a share of right answers."""
    return bool(documents) and documents[0].kind == "text"


def perplexity(scores: Sequence[Score]) -> float:
    """Exp of the mean negative log-likelihood per token over all documents."""
    return math.exp(-sum(s.loglikelihood for s in scores) / max(1, sum(s.tokens for s in scores)))


def figure(scores: Sequence[Score], documents: Sequence[Document]) -> float:
    """The reported figure alone: per cent right, or perplexity."""
    return perplexity(scores) if is_text(documents) else 100 * float(np.mean([s.value for s in scores]))


def summary(scores: Sequence[Score], base: Sequence[Score], documents: Sequence[Document], seed: int) -> dict[str, Any]:
    """One row of a table: the score, its paired gain over the base with a 95 % interval, items won and lost.

    Scores and gains of tasks are in per cent and points; of text, the score is perplexity and ``ratio`` its quotient to
    the base's.
    """
    keys = [d.key for d in documents]
    gains = [a.value - b.value for a, b in zip(scores, base, strict=True)]
    if is_text(documents):
        ratio = ratio_bootstrap(
            [-s.loglikelihood for s in scores], [-s.loglikelihood for s in base], [s.tokens for s in base], keys, seed
        )
        gain = cluster_bootstrap(gains, keys, seed)
        return {
            "score": figure(scores, documents),
            "gain": interval_as_json(gain),
            "ratio": interval_as_json(ratio),
            "documents": len(scores),
        }
    gain = cluster_bootstrap(gains, keys, seed).scaled(100)
    row = {"score": figure(scores, documents), "gain": interval_as_json(gain), "documents": len(scores)}
    if also := _also(scores, base, keys, seed):
        row["also"] = also
    if all(s.value in (0.0, 1.0) for s in [*scores, *base]):
        won, lost, p = mcnemar([s.value for s in base], [s.value for s in scores])
        row |= {"won": won, "lost": lost, "mcnemar_p": p}
    return row


def average(domains: Sequence[Mapping[str, Any]], seed: int) -> dict[str, dict[str, Any]]:
    """Way -> mean score over the domains that are scored in points, each counting the same, and its gain over the first way.

    Args:
        domains: Of an evaluation's result, with their documents.
        seed: Of the bootstrap.

    Returns:
        Empty for fewer than two such domains.
    """
    scored = [d for d in domains if d["unit"] == "points"]
    if len(scored) < 2:
        return {}
    return {way: {**row, "domains": len(scored)} for way, row in mean_of_domains(scored, seed).items()}


def mean_of_domains(domains: Sequence[Mapping[str, Any]], seed: int) -> dict[str, dict[str, Any]]:
    """Way -> mean score of one or more domains that are scored in points, and its gain over the first way."""
    first = next(iter(domains[0]["rows"]))
    found = {}
    for way in domains[0]["rows"]:
        parts = [([x[way] - x[first] for x in d["documents"]], [x["key"] for x in d["documents"]]) for d in domains]
        gain = mean_of_bootstraps(parts, seed).scaled(100)
        score = sum(d["rows"][way]["score"] for d in domains) / len(domains)
        found[way] = {"score": score, "gain": interval_as_json(gain)}
    return found


def _also(scores: Sequence[Score], base: Sequence[Score], keys: Sequence[str], seed: int) -> dict[str, Any]:
    """The same of every other figure that all documents have: pass@10 from the samples of pass@1."""
    mine, theirs = [dict(s.also) for s in scores], [dict(s.also) for s in base]
    shared = [n for n in mine[0] if all(n in found for found in (*mine, *theirs))] if mine else []
    found = {}
    for name in shared:
        gain = cluster_bootstrap([a[name] - b[name] for a, b in zip(mine, theirs, strict=True)], keys, seed).scaled(100)
        found[name] = {"score": 100 * float(np.mean([a[name] for a in mine])), "gain": interval_as_json(gain)}
    return found


def interval_as_json(interval: Interval) -> dict[str, float]:
    """Mean, low and high."""
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}
