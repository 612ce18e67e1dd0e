"""What may be claimed from paired scores: intervals, one-sided tests, and the price of asking many times.

Documents that share a content key are one cluster: they are drawn, and their signs are flipped, together. A figure of text
weighs documents by their tokens, in the search, in the test and in the report alike, so that all three have one sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import root_scalar
from scipy.stats import binom, norm
from scipy.stats import t as student

from freemoe.core.errors import DataError, NumericError

_EXACT_CLUSTERS = 14  # up to here all sign flips are listed; above, they are drawn
_ENOUGH_REACHED = 200  # draws that reach the statistic, after which its p-value is known to a tenth
_CHUNK = 500  # draws at a time, so that memory stays small whatever the number of documents
MIN_CLUSTERS = 20  # Independent documents below which a report gives no verdict: no interval is trustworthy there
HEAVY_LOSS = 1.0
"""Nats per token by which a document of text must lose to count as ruined; an answer cannot lose more than itself."""
POWER, LOSSES = 0.8, 0.02
MIN_CHANGED = 10  # Changed answers below which a report gives no verdict on right-or-wrong scores


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval; the ends are infinite where there is none."""

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """The same interval in another unit, e.g. points instead of shares; below zero its ends change places."""
        return Interval(self.mean * factor, *sorted((self.low * factor, self.high * factor)))

    def mapped(self, function: Callable[[float], float]) -> Interval:
        """The interval of an increasing function of the mean."""
        return Interval(function(self.mean), function(self.low), function(self.high))

    def as_json(self) -> dict[str, float | None]:
        """Mean, low and high; None for ends that are not known."""
        return {name: end if math.isfinite(end) else None for name, end in vars(self).items()}


def cluster_sums(
    values: Sequence[float] | np.ndarray, clusters: Sequence[str], weights: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted sums of every cluster's values, and its weight, in order of first appearance.

    ``values``: ``(documents,)`` or ``(documents, candidates)``. ``weights``: of every document; 1 each if absent. Gives
    ``(clusters,)`` or ``(clusters, candidates)``, and ``(clusters,)``.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise DataError("No scores to compare: the list of documents is empty.")
    if len(array) != len(clusters):
        raise DataError(f"{len(array)} scores but {len(clusters)} cluster keys; every document needs one of each.")
    if not np.isfinite(array).all():
        raise NumericError(f"{int((~np.isfinite(array)).sum())} of {array.size} scores are NaN or infinite.")
    scale = np.ones(len(array)) if weights is None else np.asarray(weights, dtype=np.float64)
    index: dict[str, int] = {}
    ids = np.array([index.setdefault(c, len(index)) for c in clusters])
    sums = np.zeros((len(index), *array.shape[1:]))
    np.add.at(sums, ids, (array.T * scale).T)
    return sums, np.bincount(ids, weights=scale)


class _MeanEstimate(NamedTuple):
    """A mean, the middle of its interval, their standard error and its degrees of freedom."""

    mean: float
    middle: float
    error: float
    freedom: float

    def confidence_interval(self) -> Interval:
        if not self.freedom > 0:
            return Interval(self.mean, -math.inf, math.inf)
        half = float(student.ppf(0.975, self.freedom)) * self.error
        return Interval(self.mean, self.middle - half, self.middle + half)


def _degrees_of_freedom(squares: Sequence[float], freedoms: Sequence[float]) -> float:
    """Degrees of freedom of a sum of independent squared errors, after Welch and Satterthwaite."""
    spread = sum(s**2 / f if f else math.inf for s, f in zip(squares, freedoms, strict=True))
    return sum(squares) ** 2 / spread if 0 < spread < math.inf else (0.0 if spread else math.inf)


def _estimate_mean(
    values: Sequence[float], clusters: Sequence[str], weights: Sequence[float] | None, draws: Sequence[float] = ()
) -> _MeanEstimate:
    sums, sizes = cluster_sums(values, clusters, weights)
    mean, count = float(sums.sum() / sizes.sum()), len(sums)
    middle, error = mean, math.inf
    if count > 1:
        # One document that gained and one that lost: by a whole answer, or by as much as any did.
        largest = 1.0 if _are_answers(values) and weights is None else float(np.abs(sums / sizes).max())
        typical = sizes.mean()
        sums = np.append(sums, [typical * largest, -typical * largest])
        sizes = np.append(sizes, [typical, typical])
        middle = float(sums.sum() / sizes.sum())
        error = math.sqrt(((sums - middle * sizes) ** 2).sum() * (count + 2) / (count + 1)) / float(sizes.sum())
    if not draws:
        return _MeanEstimate(mean, middle, error, count - 1)
    squares = error**2, float(np.var(draws, ddof=1)) / len(draws) if len(draws) > 1 else math.inf
    return _MeanEstimate(
        mean, middle, math.sqrt(sum(squares)), _degrees_of_freedom(squares, (count - 1, len(draws) - 1))
    )


def mean_interval(
    values: Sequence[float],
    clusters: Sequence[str],
    weights: Sequence[float] | None = None,
    draws: Sequence[float] = (),
) -> Interval:
    """Mean of paired differences with Student's interval over clusters.

    Before its width is taken, one document that gained and one that lost are added. For right-or-wrong answers that is the
    adjusted interval of Bonett and Price (2012, J. Educ. Behav. Stat. 37): no changed answer is not an interval of width 0. What
    losses rarer than one in as many documents as there are would do, no interval can know.

    ``values``: difference of every document. ``clusters``: content keys; one key alone has no interval. ``weights``: of the
    documents: tokens, for text. ``draws``: where ``values`` are means over random draws, such as masks: the mean of every
    draw. The interval is then one of the mean over all possible draws; one draw alone has none.
    """
    return _estimate_mean(values, clusters, weights, draws).confidence_interval()


def mean_of_means(
    parts: Sequence[tuple[Sequence[float], Sequence[str]]],
    zeros: int = 0,
    draws: Sequence[Sequence[float]] | None = None,
) -> Interval:
    """Mean of several groups' means, each group counting the same; degrees of freedom after Welch and Satterthwaite.

    ``parts``: per group its differences and their content keys. ``zeros``: further groups whose mean is 0 because nothing
    is different there. ``draws``: per group of ``parts`` the mean of every random draw, as in `mean_interval`.
    """
    groups = len(parts) + zeros
    found = [_estimate_mean(*part, None, means) for part, means in zip(parts, draws or [()] * len(parts), strict=True)]
    squares = [e.error**2 for e in found]
    return _MeanEstimate(
        sum(e.mean for e in found) / groups,
        sum(e.middle for e in found) / groups,
        math.sqrt(sum(squares)) / groups,
        _degrees_of_freedom(squares, [e.freedom for e in found]),
    ).confidence_interval()


def exponential(interval: Interval) -> Interval:
    """The interval of exp(mean): ends that are not known stay unknown, all others stay finite."""
    return interval.mapped(lambda end: end if math.isinf(end) else math.exp(min(end, 700.0)))


def _are_answers(differences: Sequence[float] | np.ndarray) -> bool:
    """Whether differences are of right-or-wrong answers: lost, unchanged or won."""
    return bool(np.isin(differences, (-1.0, 0.0, 1.0)).all())


def paired_test(
    gains: Sequence[float] | np.ndarray,
    clusters: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    picked: int = 0,
    seed: int = 0,
    draws: int = 20000,
) -> float:
    """One-sided p-value that a candidate's mean gain is above zero, whoever picked it from all that are given.

    The null distribution is that of the *largest* statistic of all candidates (Westfall and Young 1993, single step), so that the
    very documents that chose the candidate may test it.

    Right-or-wrong answers: signs of clusters are flipped, for all candidates together. A lost answer weighs as much as a won one,
    so that differences of mean zero are symmetric and the test is exact; of one candidate with one document per cluster it
    is the one-sided McNemar test. Other scores may be skewed, where flips alone pass many losses that are rare and large: there the
    larger p-value of two counts, of flips of the mean and of the bootstrap of the studentised mean (Romano and Wolf 2005,
    Econometrica 73), whose null distribution is as skewed as the scores are. Where nothing differs the p-value is 1.

    ``gains``: ``(documents,)`` or ``(documents, candidates)``: paired differences to the base. ``weights``: of the
    documents: tokens, for text. ``picked``: the candidate that is claimed. ``seed``: of flips and draws. ``draws``: their
    number, where they cannot all be listed.
    """
    array = np.asarray(gains, dtype=np.float64)
    sums, sizes = cluster_sums(array if array.ndim > 1 else array[:, None], clusters, weights)
    changed = sums.any(1)
    if not sums[:, picked].any():
        return 1.0
    answers = weights is None and _are_answers(gains)
    flipped = sums[changed]
    if answers:
        # Candidates that change few answers count beside those that change many.
        flipped = flipped / np.sqrt(np.maximum((flipped**2).sum(0), 1.0))
    if flipped.shape[1] == 1 and np.allclose(np.abs(flipped), np.abs(flipped[0]), atol=0):
        return float(binom.sf(int((flipped > 0).sum()) - 1, len(flipped), 0.5))
    p = _tail_probability(flipped.sum(0)[picked], _flip_signs(flipped, seed, draws), len(flipped) > _EXACT_CLUSTERS)
    if answers:
        return p
    centred = sums - sums.sum(0) / sizes.sum() * sizes[:, None]
    spread = math.sqrt((centred[:, picked] ** 2).sum())
    if spread <= 1e-12 * np.abs(sums[:, picked]).sum():
        return p
    # As if one more document had lost as much as any changed: of rare losses a sample shows too few.
    total = sums[:, picked].sum() - np.abs(sums[:, picked]).max()
    return max(p, _tail_probability(total / spread, _draw_studentised(centred, seed, draws), True))


def _tail_probability(statistic: float, null: Iterator[np.ndarray], drawn: bool) -> float:
    """Share of a null distribution that reaches a statistic; where it is drawn, the observed one is a draw as well.

    Once it was reached often enough nothing further is drawn (Besag and Clifford 1991, Biometrika 78): a p-value that is no small
    one needs no twenty thousand draws.
    """
    reached, total = int(drawn), int(drawn)
    # Sums in another order differ in their last bits: they count as equal, whatever the unit of the scores.
    bound = statistic - 1e-9 * abs(statistic)
    for values in null:
        reached, total = reached + int((values >= bound).sum()), total + len(values)
        if drawn and reached >= _ENOUGH_REACHED:
            break
    return reached / total


def _flip_signs(sums: np.ndarray, seed: int, draws: int) -> Iterator[np.ndarray]:
    """Largest sum over candidates under sign flips of the clusters: ``(clusters, candidates)`` -> parts of ``(draws,)``."""
    if len(sums) <= _EXACT_CLUSTERS:
        bits = (np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1
        yield ((2 * bits - 1) @ sums).max(1)
        return
    rng = np.random.default_rng(seed)
    for start in range(0, draws, _CHUNK):
        signs = rng.integers(0, 2, size=(min(_CHUNK, draws - start), len(sums))) * 2.0 - 1.0
        yield (signs @ sums).max(1)


def _draw_studentised(centred: np.ndarray, seed: int, draws: int) -> Iterator[np.ndarray]:
    """Largest studentised sum over candidates of clusters drawn with replacement, in parts of ``(draws,)``."""
    rng, count = np.random.default_rng(seed), len(centred)
    for start in range(0, draws, _CHUNK):
        times = rng.multinomial(count, np.full(count, 1 / count), size=min(_CHUNK, draws - start)).astype(np.float64)
        total = times @ centred
        spread = np.sqrt(np.maximum(times @ centred**2 - total**2 / count, 1e-300))
        yield (total / spread).max(1)


def mcnemar(base: Sequence[float], other: Sequence[float]) -> tuple[int, int, float]:
    """Items won, items lost, and the two-sided exact McNemar p-value of two lists of right (1) or wrong (0)."""
    a, b = np.asarray(base), np.asarray(other)
    if a.shape != b.shape:
        raise DataError(f"McNemar's test compares the same items: got {a.size} and {b.size}.")
    won, lost = int((b > a).sum()), int((b < a).sum())
    return won, lost, float(min(1.0, 2 * binom.cdf(min(won, lost), won + lost, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: p-values that hold for all tests together, in the order given."""
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(order))
    steps = np.arange(len(order), 0, -1) * np.asarray(p_values, dtype=np.float64)[order]
    adjusted[order] = np.maximum.accumulate(np.minimum(steps, 1.0))
    return adjusted.tolist()


def detectable_gain(documents: int, level: float) -> float:
    """Smallest true gain of right-or-wrong answers that a one-sided test finds with the probability `POWER`.

    The candidate loses the share `LOSSES` of the answers; the gain is what it wins beyond them.

    ``documents``: different documents that test it. ``level``: of this one test, after all adjustments. Gives a share; 1
    where even winning every answer that is not lost would not do.
    """
    changed = np.arange(documents + 1)
    needed = binom.isf(level, changed, 0.5)

    def missing_power(gain: float) -> float:
        found = binom.sf(needed, changed, (gain + LOSSES) / (gain + 2 * LOSSES))
        return POWER - float(binom.pmf(changed, documents, gain + 2 * LOSSES) @ found)

    most = 1 - 2 * LOSSES
    return 1.0 if missing_power(most) > 0 else float(root_scalar(missing_power, bracket=(1e-6, most), xtol=1e-4).root)


def detectable_effect(documents: int, level: float) -> float:
    """`detectable_gain` of scores that spread around their mean, such as text's: in standard deviations of a document's gain.

    That is if gains are normally distributed. The document that `paired_test` adds loses as much as the largest of them.
    """
    documents = max(documents, 2)  # one has no spread
    found = float(student.isf(level, documents - 1) + norm.ppf(POWER)) / math.sqrt(documents)
    return (found + float(norm.isf(0.5 / documents)) / documents) / (1 - 1 / documents)


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean over repeats, such as training seeds, with Student's 95 % interval: another user's is another draw of the same kind.

    A single value has no bounds.
    """
    mean, count = float(np.mean(values)), len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.inf
    return _MeanEstimate(mean, mean, error, count - 1).confidence_interval()
