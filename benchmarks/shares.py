"""Gains on the same documents, and which share of a rival's gain a method reaches; each with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from freemoe.evals.statistics import Interval, cluster_sums, mean_interval

_DRAWS = 2000  # of the bootstrap, a hundred at a time


def gain_interval(
    differences: Sequence[float] | np.ndarray, keys: Sequence[str], tokens: Sequence[float] | None = None
) -> Interval:
    """Gain with its 95 % interval over documents, of paired differences per document that are better when higher.

    Of nats with the scored ``tokens`` of every document: in nats per token; of right answers without them: in points.
    """
    if tokens is None:
        return mean_interval(np.asarray(differences).tolist(), keys).scaled(100)
    return mean_interval(np.divide(differences, tokens).tolist(), keys, tokens)


def shown(interval: Interval, digits: int = 2) -> str:
    """``+0.12 [+0.10, +0.15]``, or the mean alone where there are too few for an interval."""
    ends = f" [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]" if math.isfinite(interval.low) else ""
    return f"{interval.mean:+.{digits}f}{ends}"


def share_bootstrap(parts: Sequence[tuple[Sequence[float], Sequence[float], Sequence[str]]]) -> Interval:
    """Interval of mean(top) / mean(bottom): which share of a rival's gain a method reaches on the same documents.

    Clusters are drawn for both sides together, inside every group; each group's means count the same. Draws in which
    the rival gains nothing have no share: where they reach into the tails, an end of the interval is infinite.
    ``parts``: per group the method's paired differences to the base, the rival's, and the content keys.
    """
    rng = np.random.default_rng(0)
    top, bottom, means = np.zeros(_DRAWS), np.zeros(_DRAWS), np.zeros(2)
    for method, rival, clusters in parts:
        over, counts = cluster_sums(method, clusters)
        under, _ = cluster_sums(rival, clusters)
        for start in range(0, _DRAWS, 100):
            pick = rng.integers(0, len(over), size=(100, len(over)))
            total = counts[pick].sum(1)
            top[start : start + len(pick)] += over[pick].sum(1) / total
            bottom[start : start + len(pick)] += under[pick].sum(1) / total
        means += np.array([over.sum(), under.sum()]) / counts.sum()
    good = bottom > 0
    ratios = np.divide(top, bottom, out=np.where(top > 0, math.inf, -math.inf), where=good)
    low, high = np.quantile(ratios, [0.025, 0.975], method="nearest")
    return Interval(float(means[0] / means[1]) if means[1] > 0 else math.nan, float(low), float(high))
