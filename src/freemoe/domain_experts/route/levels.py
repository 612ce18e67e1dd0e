"""One level of the router, and the ways to train it (MoDE Eq. 4, 8 and 9).

Shapes: N documents, H feature size, K classes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from freemoe.core.registry import Registry
from freemoe.domain_experts.recipe import ROUTERS
from freemoe.domain_experts.route.confidence import most_likely


@dataclass(frozen=True, eq=False)
class Level:
    """One decision: ``softmax((weight @ x + bias) / temperature)``; with centroids, minus half the squared distance."""

    classes: tuple[str, ...]  # Names, in the order of the rows
    weight: Tensor  # ``(K, H)``: linear weights, or the centroids
    bias: Tensor  # ``(K,)``; empty for centroids
    temperature: float = 1.0  # Above 1 it makes the level less sure, below 1 surer; the most likely class stays

    def logits(self, x: Tensor) -> Tensor:
        """Unnormalised log-probabilities of standardised features, before the temperature: ``(N, H) -> (N, K)``."""
        if not self.bias.numel():
            # Per dimension, so that the sharpness does not grow with the feature size.
            return -(torch.cdist(x, self.weight) ** 2) / (2 * x.shape[1] ** 0.5)
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def probabilities(self, x: Tensor) -> Tensor:
        """Class probabilities of standardised features: ``(N, H) -> (N, K)``."""
        return torch.softmax(self.logits(x) / self.temperature, dim=1)

    def predict_class(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of the most likely class, and its number: ``(N, H) -> (N,), (N,)``."""
        return most_likely(self.logits(x), self.temperature)


FitLevel = Callable[[np.ndarray, np.ndarray, tuple[str, ...], int], Level]
"""Trains a level: standardised features ``(N, H)``, class numbers ``(N,)``, the classes' names, the solver's seed."""

LEVELS: Registry[FitLevel] = Registry("router level", ROUTERS)


def fit_level(x: np.ndarray, labels: Sequence[str], classes: Sequence[str], kind: str, seed: int) -> Level:
    """Train one level.

    ``x``: ``(N, H)`` standardised features. Of ``classes``, in their order, those that no document has are left out;
    ``kind`` is a name of `LEVELS`.
    """
    present = tuple(c for c in classes if c in labels)
    y = np.array([present.index(label) for label in labels])
    return LEVELS.get(kind)(x, y, present, seed)


def _fit_centroids(x: np.ndarray, y: np.ndarray, classes: tuple[str, ...], seed: int) -> Level:
    centres = np.stack([x[y == k].mean(0) for k in range(len(classes))])
    return Level(classes, torch.from_numpy(centres).float(), torch.empty(0))


def _fit_logistic(
    x: np.ndarray,
    y: np.ndarray,
    classes: tuple[str, ...],
    seed: int,
    inverse_penalty: float = 1.0,
    tolerance: float = 1e-4,
) -> Level:
    if len(classes) == 1:
        return Level(classes, torch.zeros(1, x.shape[1]), torch.zeros(1))
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        # Separable classes never converge fully; the direction is good long before.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = LogisticRegression(C=inverse_penalty, tol=tolerance, max_iter=300, random_state=seed).fit(x, y)
    weight, bias = found.coef_, found.intercept_
    if len(classes) == 2:
        # scikit-learn gives one row for two classes; softmax of (-z/2, z/2) is the same sigmoid.
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    # Laid out as it comes back from disk, so that it multiplies in the same order there.
    return Level(classes, torch.from_numpy(weight).float().contiguous(), torch.from_numpy(bias).float())


LEVELS.add("linear", _fit_logistic, "multinomial logistic regression, L2-regularised with C = 1 (MoDE Eq. 8)")
LEVELS.add(
    "unregularised",
    partial(_fit_logistic, inverse_penalty=math.inf, tolerance=1e-9),
    "the same by cross-entropy alone (MoDE Eq. 9)",
)
LEVELS.add("centroid", _fit_centroids, "the nearest mean feature (MoDE Eq. 4)")
