"""What a router's confidence is worth: its calibration, measured and fitted, and the threshold below which to abstain.

Everything here reads confidences of documents that the routing model did not see, and whether it was right.

Shapes: N documents, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# From 1/20 to 20 in steps of 5 %; 1 comes first, so that it stays where nothing speaks for another.
_TEMPERATURES = sorted((1.05**step for step in range(-61, 62)), key=lambda t: max(t, 1 / t))


def most_likely(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Confidence in the most likely class, and that class: ``(N, K) -> (N,), (N,)``."""
    confidence, picked = torch.softmax(logits / temperature, dim=1).max(1)
    return confidence, picked


def fit_temperature(logits: Tensor, right: Sequence[bool]) -> float:
    """The temperature under which confidence means the chance to be right (Guo et al. 2017).

    The likelihood is that of being right or wrong, with the targets of Platt (1999), which never reach 0 and 1: a model
    that was always right on N documents is not certain, but right in about N + 1 of N + 2. ``logits``: ``(N, K)`` of
    documents that the model did not see; a class that it did not know is minus infinity. ``right``: whether the class with
    the largest logit is the true one. It is a number from 0.05 to 20; 1 where there is nothing to fit.
    """
    if not len(right) or logits.shape[1] < 2:
        return 1.0
    hit = torch.tensor(right)
    hits = int(hit.sum())
    target = torch.where(hit, (hits + 1) / (hits + 2), 1 / (len(right) - hits + 2)).double()
    losses = []
    for temperature in _TEMPERATURES:
        sure, _ = most_likely(logits.double(), temperature)
        sure = sure.clamp(max=1 - 1e-12)
        losses.append(float(-(target * sure.log() + (1 - target) * (-sure).log1p()).mean()))
    return _TEMPERATURES[int(np.argmin(losses))]


def expected_calibration_error(confidence: Sequence[float], right: Sequence[bool], bins: int = 10) -> float:
    """Mean gap between confidence and accuracy over bins of equal width, weighted by their sizes."""
    c, r = np.asarray(confidence, dtype=float), np.asarray(right, dtype=float)
    place = np.minimum((c * bins).astype(int), bins - 1)
    gaps = [
        abs(c[place == b].mean() - r[place == b].mean()) * (place == b).sum() for b in range(bins) if (place == b).any()
    ]
    return float(sum(gaps) / max(1, len(c)))


def abstention_threshold(confidence: Sequence[float], right: Sequence[bool], precision: float) -> float:
    """Smallest confidence above which at least ``precision`` of the routes are right; above 1 if there is none."""
    order = np.argsort(-np.asarray(confidence), kind="stable")
    falling = np.asarray(confidence, dtype=float)[order]
    hits = np.cumsum(np.asarray(right, dtype=float)[order]) / np.arange(1, len(order) + 1)
    # Equal confidences (often 1.0) pass or abstain together, so only the last of them can be the threshold.
    last = np.append(falling[1:] < falling[:-1], True)[: len(order)]
    good = np.flatnonzero((hits >= precision) & last)
    return float(falling[good[-1]]) if len(good) else 1.01
