"""What may be claimed from paired scores: intervals, one-sided tests, and the price of asking many times.

Documents that share a content key are one cluster: they are drawn, and their signs are flipped, together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom
from scipy.stats import t as student

from freemoe.core.errors import DataError, NumericError

# Above this many non-zero clusters the sign-flip test draws its flips instead of listing all of them.
_EXACT_CLUSTERS = 14


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval (percentile bootstrap over clusters)."""

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """The same interval in another unit, e.g. points instead of shares."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)


def _checked(values: Sequence[float], clusters: Sequence[str]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise DataError("No scores to compare: the list of documents is empty.")
    if array.size != len(clusters):
        raise DataError(f"{array.size} scores but {len(clusters)} cluster keys; every document needs one of each.")
    if not np.isfinite(array).all():
        raise NumericError(f"{int((~np.isfinite(array)).sum())} of {array.size} scores are NaN or infinite.")
    return array


def cluster_sums(values: Sequence[float], clusters: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the values and number of documents of every cluster, in order of first appearance: both ``(clusters,)``."""
    array = _checked(values, clusters)
    index: dict[str, int] = {}
    ids = np.array([index.setdefault(c, len(index)) for c in clusters])
    return np.bincount(ids, weights=array), np.bincount(ids).astype(np.float64)


def _drawn_means(sums: np.ndarray, weights: np.ndarray, rng: np.random.Generator, draws: int) -> np.ndarray:
    """Bootstrap of sum(sums) / sum(weights) over clusters: both ``(clusters,)`` -> ``(draws,)``, a few draws at a time."""
    means = np.empty(draws)
    for start in range(0, draws, 100):
        pick = rng.integers(0, len(sums), size=(min(100, draws - start), len(sums)))
        means[start : start + len(pick)] = sums[pick].sum(1) / weights[pick].sum(1)
    return means


def cluster_bootstrap(
    values: Sequence[float], clusters: Sequence[str], seed: int = 0, draws: int = 2000, level: float = 0.95
) -> Interval:
    """Mean of ``values`` with a percentile bootstrap interval over clusters."""
    sums, counts = cluster_sums(values, clusters)
    means = _drawn_means(sums, counts, np.random.default_rng(seed), draws)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))


def mean_of_bootstraps(
    parts: Sequence[tuple[Sequence[float], Sequence[str]]], seed: int = 0, draws: int = 2000
) -> Interval:
    """Mean of several groups' means, each group counting the same, with clusters drawn inside every group.

    Args:
        parts: Per group its values and their content keys.
        seed: Of the bootstrap.
        draws: Bootstrap draws.
    """
    rng = np.random.default_rng(seed)
    total, mean = np.zeros(draws), 0.0
    for values, clusters in parts:
        sums, counts = cluster_sums(values, clusters)
        total += _drawn_means(sums, counts, rng, draws)
        mean += sums.sum() / counts.sum()
    low, high = np.quantile(total / len(parts), [0.025, 0.975])
    return Interval(float(mean / len(parts)), float(low), float(high))


def ratio_bootstrap(
    top: Sequence[float], bottom: Sequence[float], weights: Sequence[float], clusters: Sequence[str], seed: int = 0
) -> Interval:
    """Interval of exp(sum(top - bottom) / sum(weights)): the ratio of two perplexities over the same tokens.

    Args:
        top: Negative log-likelihood of every document under the expert, in nats.
        bottom: The same under the base.
        weights: Tokens of every document.
        clusters: Content keys.
        seed: Of the bootstrap.
    """
    sums, _ = cluster_sums(np.subtract(top, bottom).tolist(), clusters)
    tokens, _ = cluster_sums(weights, clusters)
    ratios = np.exp(_drawn_means(sums, tokens, np.random.default_rng(seed), 2000))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Interval(float(np.exp(sums.sum() / tokens.sum())), float(low), float(high))


def share_bootstrap(
    parts: Sequence[tuple[Sequence[float], Sequence[float], Sequence[str]]], seed: int = 0, draws: int = 2000
) -> Interval:
    """Interval of mean(top) / mean(bottom): which share of a rival's gain a method reaches on the same documents.

    Clusters are drawn for both sides together, inside every group; each group's means count the same. Draws in which
    the rival gains nothing have no share: where they reach into the tails, an end of the interval is infinite.

    Args:
        parts: Per group the method's paired differences to the base, the rival's, and the content keys.
        seed: Of the bootstrap.
        draws: Bootstrap draws.
    """
    rng = np.random.default_rng(seed)
    top, bottom, means = np.zeros(draws), np.zeros(draws), np.zeros(2)
    for method, rival, clusters in parts:
        over, counts = cluster_sums(method, clusters)
        under, _ = cluster_sums(rival, clusters)
        for start in range(0, draws, 100):
            pick = rng.integers(0, len(over), size=(min(100, draws - start), len(over)))
            total = counts[pick].sum(1)
            top[start : start + len(pick)] += over[pick].sum(1) / total
            bottom[start : start + len(pick)] += under[pick].sum(1) / total
        means += np.array([over.sum(), under.sum()]) / counts.sum()
    good = bottom > 0
    ratios = np.divide(top, bottom, out=np.where(top > 0, math.inf, -math.inf), where=good)
    low, high = np.quantile(ratios, [0.025, 0.975], method="nearest")
    return Interval(float(means[0] / means[1]) if means[1] > 0 else math.nan, float(low), float(high))


def paired_test(differences: Sequence[float], clusters: Sequence[str], seed: int = 0, draws: int = 20000) -> float:
    """One-sided p-value that the mean paired difference is above zero, by flipping the signs of clusters.

    Exact for few clusters; for right-or-wrong scores with one document per cluster it is the exact one-sided
    McNemar test. With no difference anywhere the p-value is 1.
    """
    sums, _ = cluster_sums(differences, clusters)
    sums = sums[sums != 0]
    if not len(sums):
        return 1.0
    seen = sums.sum()
    size = np.abs(sums)
    # Sums in another order differ in their last bits: they count as equal, whatever the unit of the scores.
    seen -= 1e-12 * size.sum()
    if np.allclose(size, size[0], atol=0):
        wins = int((sums > 0).sum())
        return float(binom.sf(wins - 1, len(sums), 0.5))
    if len(sums) <= _EXACT_CLUSTERS:
        bits = (np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1
        flipped = ((2 * bits - 1) * size).sum(1)
        return float((flipped >= seen).mean())
    rng = np.random.default_rng(seed)
    at_least = 0
    for start in range(0, draws, 1000):
        signs = rng.integers(0, 2, size=(min(1000, draws - start), len(sums))) * 2 - 1
        at_least += int(((signs * size).sum(1) >= seen).sum())
    return (at_least + 1) / (draws + 1)


def mcnemar(base: Sequence[float], other: Sequence[float]) -> tuple[int, int, float]:
    """Items won, items lost, and the two-sided exact McNemar p-value of two lists of right (1) or wrong (0)."""
    a, b = np.asarray(base), np.asarray(other)
    if a.shape != b.shape:
        raise DataError(f"McNemar's test compares the same items: got {a.size} and {b.size}.")
    won, lost = int((b > a).sum()), int((b < a).sum())
    if won + lost == 0:
        return 0, 0, 1.0
    return won, lost, float(min(1.0, 2 * binom.cdf(min(won, lost), won + lost, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: p-values that hold for all tests together, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def smallest_p(documents: int) -> float:
    """Smallest p-value a one-sided paired test can give on so many documents: below it no gain can be proven."""
    return 0.5**documents


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean over repeats, such as training seeds, with Student's 95 % interval: another user's is another draw of the same kind.

    A single value has no bounds.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)
