"""The two-level router (MoDE Eq. 8-10): a domain, then a subdomain in it, or the base when it is not sure.

Each level is one linear layer with softmax, trained by cross-entropy (multinomial logistic regression) on standardised
features of reference documents. Level 2 can be the nearest centroid instead (MoDE Eq. 4).

Shapes: N documents, H feature size, K classes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freemoe.domain_experts.choice import folds


@dataclass(frozen=True)
class Route:
    """Where a prompt goes: its domain, its subdomain, and how sure the router is (product of both levels)."""

    domain: str
    subdomain: str
    confidence: float


@dataclass(frozen=True, eq=False)
class Level:
    """One decision: ``softmax(weight @ x + bias)``; or, with centroids, softmax of minus half the squared distance.

    Attributes:
        classes: Names, in the order of the rows.
        weight: ``(K, H)``: linear weights, or the centroids.
        bias: ``(K,)``; empty for centroids.
    """

    classes: tuple[str, ...]
    weight: Tensor
    bias: Tensor

    def probabilities(self, x: Tensor) -> Tensor:
        """Class probabilities of standardised features: ``(N, H) -> (N, K)``."""
        if not self.bias.numel():
            # Per dimension, so that the sharpness does not grow with the feature size.
            return torch.softmax(-(torch.cdist(x, self.weight) ** 2) / (2 * x.shape[1] ** 0.5), dim=1)
        return torch.softmax(x @ self.weight.T + self.bias, dim=1)


def fit_level(x: np.ndarray, labels: Sequence[str], classes: Sequence[str], kind: str, seed: int) -> Level:
    """Train one level.

    Args:
        x: ``(N, H)`` standardised features.
        labels: Class of each document.
        classes: All classes, in order.
        kind: ``linear`` or ``centroid``.
        seed: Of the solver.
    """
    present = [c for c in classes if c in labels]
    y = np.array([present.index(label) for label in labels])
    if kind == "centroid":
        centres = np.stack([x[y == k].mean(0) for k in range(len(present))])
        return Level(tuple(present), torch.from_numpy(centres).float(), torch.empty(0))
    if len(present) == 1:
        return Level(tuple(present), torch.zeros(1, x.shape[1]), torch.zeros(1))
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        # Separable classes never converge fully; the direction is good long before.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = LogisticRegression(max_iter=300, random_state=seed).fit(x, y)
    weight, bias = found.coef_, found.intercept_
    if len(present) == 2:
        # scikit-learn gives one row for two classes; softmax of (-z/2, z/2) is the same sigmoid.
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return Level(tuple(present), torch.from_numpy(weight).float(), torch.from_numpy(bias).float())


@dataclass(frozen=True, eq=False)
class Router:
    """A trained router.

    Attributes:
        mean: ``(H,)`` mean of the features it was trained on.
        scale: ``(H,)`` their standard deviation.
        domain: Level 1.
        subdomain: Level 2 by domain.
        threshold: Confidence below which it abstains: the base answers.
        feature: Kind of feature it reads.
    """

    mean: Tensor
    scale: Tensor
    domain: Level
    subdomain: dict[str, Level]
    threshold: float
    feature: str = "embedding"

    def route(self, feature: Tensor) -> list[Route]:
        """Route features ``(N, H)``; ask `abstains` whether to follow."""
        x = (feature.float().cpu() - self.mean) / self.scale
        first = self.domain.probabilities(x)
        routes = []
        for i, (p1, k1) in enumerate(zip(*[t.tolist() for t in first.max(1)], strict=True)):
            domain = self.domain.classes[k1]
            p2, k2 = self.subdomain[domain].probabilities(x[i : i + 1])[0].max(0)
            routes.append(Route(domain, self.subdomain[domain].classes[int(k2)], p1 * float(p2)))
        return routes

    def abstains(self, route: Route) -> bool:
        """Whether a route is too unsure to follow; the base answers then."""
        return route.confidence < self.threshold

    def describe(self) -> dict[str, Any]:
        """The part of the router that stands in the manifest."""
        return {
            "domains": list(self.domain.classes),
            "subdomains": {d: list(level.classes) for d, level in self.subdomain.items()},
            "threshold": self.threshold,
            "feature": self.feature,
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """The part that stands in ``router.safetensors``."""
        out = {
            "mean": self.mean,
            "scale": self.scale,
            "domain|weight": self.domain.weight,
            "domain|bias": self.domain.bias,
        }
        for name, level in self.subdomain.items():
            out[f"subdomain|{name}|weight"] = level.weight
            out[f"subdomain|{name}|bias"] = level.bias
        return {k: v.contiguous() for k, v in out.items()}

    @classmethod
    def from_parts(cls, described: dict[str, Any], tensors: dict[str, Tensor]) -> Router:
        """Rebuild a router from its manifest entry and tensors."""
        levels = {
            name: Level(tuple(classes), tensors[f"subdomain|{name}|weight"], tensors[f"subdomain|{name}|bias"])
            for name, classes in described["subdomains"].items()
        }
        first = Level(tuple(described["domains"]), tensors["domain|weight"], tensors["domain|bias"])
        return cls(tensors["mean"], tensors["scale"], first, levels, described["threshold"], described["feature"])


def _fit(feature: Tensor, domains: Sequence[str], subdomains: Sequence[str], kind: str, seed: int) -> Router:
    x = feature.double().numpy()
    mean, scale = x.mean(0), x.std(0)
    scale[scale < 1e-12] = 1.0
    x = (x - mean) / scale
    names = list(dict.fromkeys(domains))
    levels = {}
    for name in names:
        mine = [i for i, d in enumerate(domains) if d == name]
        labels = [subdomains[i] for i in mine]
        levels[name] = fit_level(x[mine], labels, sorted(dict.fromkeys(labels)), kind, seed)
    return Router(
        torch.from_numpy(mean).float(),
        torch.from_numpy(scale).float(),
        fit_level(x, domains, names, "linear", seed),
        levels,
        0.0,
    )


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


def train_router(
    feature: Tensor,
    domains: Sequence[str],
    subdomains: Sequence[str],
    keys: Sequence[str],
    *,
    level2: str = "linear",
    precision: float = 0.9,
    kind: str = "embedding",
    seed: int = 0,
) -> tuple[Router, dict[str, Any]]:
    """Train both levels on reference documents and choose the confidence below which to abstain.

    Threshold, accuracies and calibration error come from routes of documents that the routing model did not see
    (5 folds that keep content keys together).

    Args:
        feature: ``(N, H)``.
        domains: Domain of each document.
        subdomains: Subdomain of each document.
        keys: Content key of each document.
        level2: ``linear`` or ``centroid``.
        precision: Share of routes above the threshold that shall be right.
        kind: Name of the feature, stored with the router.
        seed: Of folds and solver.

    Returns:
        The router, and its figures: accuracy and calibration error per level, the threshold, latency in milliseconds.
    """
    confidence = np.zeros(len(domains))
    first_confidence = np.zeros(len(domains))
    guessed: list[tuple[str, str]] = [("", "")] * len(domains)
    parts = folds(keys, 5, seed)
    for part in parts if len(parts) > 1 else []:
        out = frozenset(part)
        inside = [i for i in range(len(domains)) if i not in out]
        model = _fit(feature[inside], [domains[i] for i in inside], [subdomains[i] for i in inside], level2, seed)
        x = (feature[part].float() - model.mean) / model.scale
        first_confidence[part] = model.domain.probabilities(x).max(1).values.numpy()
        for i, route in zip(part, model.route(feature[part]), strict=True):
            guessed[i], confidence[i] = (route.domain, route.subdomain), route.confidence
    right_domain = [g[0] == d for g, d in zip(guessed, domains, strict=True)]
    right = [g[1] == s and ok for g, s, ok in zip(guessed, subdomains, right_domain, strict=True)]
    threshold = abstention_threshold(confidence.tolist(), right, precision)
    full = _fit(feature, domains, subdomains, level2, seed)
    router = Router(full.mean, full.scale, full.domain, full.subdomain, threshold, kind)
    figures = {
        "documents": len(domains),
        "domain_accuracy": float(np.mean(right_domain)),
        "subdomain_accuracy": float(np.mean(right)),
        "domain_ece": expected_calibration_error(first_confidence.tolist(), right_domain),
        "subdomain_ece": expected_calibration_error(confidence.tolist(), right),
        "threshold": threshold,
        "abstained": float(np.mean(confidence < threshold)),
        "measured": "5-fold, on reference documents that the routing model did not see",
        **latency(router, feature),
    }
    return router, figures


def latency(router: Router, feature: Tensor, repeats: int = 200) -> dict[str, float]:
    """p50 and p95 milliseconds to route one feature vector, the embedding itself left out."""
    times = []
    for i in range(repeats):
        row = feature[i % len(feature)][None]
        start = time.perf_counter()
        router.route(row)
        times.append((time.perf_counter() - start) * 1000)
    return {"p50_ms": float(np.quantile(times, 0.5)), "p95_ms": float(np.quantile(times, 0.95))}
