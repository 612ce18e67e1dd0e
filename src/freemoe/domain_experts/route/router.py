"""The two-level router (MoDE Eq. 8-10): a domain, then a subdomain in it, or the base when it is not sure.

Each level is one linear layer with softmax, trained by cross-entropy (multinomial logistic regression) on standardised
features of reference documents. Level 2 can be the nearest centroid instead (MoDE Eq. 4). A temperature per level,
fitted on documents that the level did not see, makes its probabilities mean what they say.

Shapes: N documents, H feature size, K classes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.domain_experts.recipe import RouterSection
from freemoe.domain_experts.route.confidence import abstention_threshold, expected_calibration_error, fit_temperature
from freemoe.domain_experts.route.levels import Level, fit_level
from freemoe.domain_experts.route.subdomains import DomainDivision
from freemoe.domain_experts.select.choice import split_folds
from freemoe.models.mixed.rows import rows_by_key


@dataclass(frozen=True)
class Route:
    """Where a prompt goes: its domain, its subdomain, and how sure the router is.

    Attributes:
        domain: The most likely domain.
        subdomain: The most likely subdomain in it.
        confidence: Probability of both levels together: their product.
        domain_confidence: Probability of the domain alone.
    """

    domain: str
    subdomain: str
    confidence: float
    domain_confidence: float


@dataclass(frozen=True, eq=False)
class DomainRouter:
    """A trained router of two levels."""

    mean: Tensor  # ``(H,)`` mean of the features it was trained on
    scale: Tensor  # ``(H,)`` their standard deviation
    domain: Level  # Level 1
    subdomain: dict[str, Level]  # Level 2 by domain
    threshold: float  # Confidence below which it abstains: the base answers
    feature: str = "embedding"  # Kind of feature it reads

    def standardise_features(self, feature: Tensor) -> Tensor:
        """Features as the levels read them: ``(N, H) -> (N, H)`` fp32 on the CPU.

        Raises:
            NumericError: A feature is NaN or infinite: no route follows from it.
        """
        found = (feature.float().cpu() - self.mean) / self.scale
        if not bool(found.isfinite().all()):
            raise NumericError(
                "The features that the router reads have NaN or infinity, so that no expert follows from them. The base or its "
                "dtype is broken for this prompt; try --dtype float32, or name an expert."
            )
        return found

    def route(self, feature: Tensor) -> list[Route]:
        """Route features ``(N, H)``; ask `abstains` whether to follow. One matrix product per level and domain seen."""
        x = self.standardise_features(feature)
        first, domain = (t.tolist() for t in self.domain.predict_class(x))
        routes: dict[int, Route] = {}
        for k, rows in rows_by_key(domain).items():
            name = self.domain.classes[k]
            level = self.subdomain[name]
            # A lone prompt is not gathered: waking other threads for it would cost more than the whole route.
            second, subdomain = (t.tolist() for t in level.predict_class(x if len(rows) == len(x) else x[rows]))
            for i, p, c in zip(rows, second, subdomain, strict=True):
                routes[i] = Route(name, level.classes[c], first[i] * p, first[i])
        return [routes[i] for i in range(len(domain))]

    def abstains(self, route: Route) -> bool:
        """Whether a route is too unsure to follow; the base answers then."""
        return route.confidence < self.threshold

    def describe(self) -> dict[str, Any]:
        """The part of the router that stands in the manifest."""
        return {
            "domains": list(self.domain.classes),
            "subdomains": {d: list(level.classes) for d, level in self.subdomain.items()},
            "temperature": self.domain.temperature,
            "subdomain_temperatures": {d: level.temperature for d, level in self.subdomain.items()},
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
    def from_parts(cls, described: dict[str, Any], tensors: dict[str, Tensor]) -> DomainRouter:
        """Rebuild a router from its manifest entry and tensors."""

        def make_level(key: str, classes: Sequence[str], temperature: float) -> Level:
            return Level(tuple(classes), tensors[f"{key}|weight"], tensors[f"{key}|bias"], temperature)

        levels = {
            name: make_level(f"subdomain|{name}", classes, described["subdomain_temperatures"][name])
            for name, classes in described["subdomains"].items()
        }
        first = make_level("domain", described["domains"], described["temperature"])
        return cls(tensors["mean"], tensors["scale"], first, levels, described["threshold"], described["feature"])


def _fit_router(
    feature: Tensor, domains: Sequence[str], subdomains: Sequence[str], kind: str, seed: int
) -> DomainRouter:
    x = feature.double().numpy()
    mean, scale = x.mean(0), x.std(0)
    scale[scale < 1e-12] = 1.0
    x = (x - mean) / scale
    levels = {}
    for name, mine in rows_by_key(domains).items():
        labels = [subdomains[i] for i in mine]
        levels[name] = fit_level(x[mine], labels, sorted(dict.fromkeys(labels)), kind, seed)
    return DomainRouter(
        torch.from_numpy(mean).float(),
        torch.from_numpy(scale).float(),
        fit_level(x, domains, list(levels), kind if kind == "unregularised" else "linear", seed),
        levels,
        0.0,
    )


@dataclass(frozen=True, eq=False)
class _RouterFold:
    """A router, and the documents that it did not see: their numbers, features ``(N, H)``, domains, subdomains."""

    router: DomainRouter
    members: list[int]
    feature: Tensor
    domains: list[str]
    subdomains: list[str]


def _fit_level_temperature(unseen: Sequence[_RouterFold], domain: str | None) -> float:
    """Temperature of level 1, or of level 2 in a domain, from documents that the folds' routers did not see."""
    logits, right = [], []
    for fold in unseen:
        mine = [i for i, d in enumerate(fold.domains) if domain in (None, d)]
        level = fold.router.domain if domain is None else fold.router.subdomain.get(domain)
        if level is None or not mine:
            continue
        found = level.logits(fold.router.standardise_features(fold.feature[mine]))
        logits.append(found)
        labels = fold.domains if domain is None else fold.subdomains
        right += [level.classes[k] == labels[i] for k, i in zip(found.argmax(1).tolist(), mine, strict=True)]
    if not logits:
        return 1.0
    # A router whose documents lack a class has fewer columns.
    widest = max(part.shape[1] for part in logits)
    padded = [torch.nn.functional.pad(part, (0, widest - part.shape[1]), value=-torch.inf) for part in logits]
    return fit_temperature(torch.cat(padded), right)


def _calibrate_router(router: DomainRouter, unseen: Sequence[_RouterFold]) -> DomainRouter:
    """The router with the temperatures that fit the documents that the folds' routers did not see."""
    levels = {d: replace(level, temperature=_fit_level_temperature(unseen, d)) for d, level in router.subdomain.items()}
    first = replace(router.domain, temperature=_fit_level_temperature(unseen, None))
    return replace(router, domain=first, subdomain=levels)


def train_router(
    feature: Tensor,  # ``(N, H)``
    domains: Sequence[str],  # Domain of each document
    subdomains: Sequence[str],  # Subdomain of each document
    keys: Sequence[str],  # Content key of each document
    section: RouterSection = RouterSection(),  # noqa: B008
    *,
    kind: str = "embedding",  # Name of the feature, stored with the router
    seed: int = 0,  # Of folds and solver
) -> tuple[DomainRouter, dict[str, Any]]:
    """Train both levels on reference documents, calibrate them, and choose the confidence below which to abstain.

    Threshold, accuracies and calibration errors come from routes of documents that neither the routing model nor its
    temperatures saw (5 folds that keep content keys together).

    Returns:
        The router, and its figures: accuracy and calibration error per level, the latter without the temperatures too,
        the threshold, latency in milliseconds.
    """
    level2, precision = section.level2, section.precision
    parts = split_folds(keys, 5, seed)
    unseen = []
    for part in parts if len(parts) > 1 else []:
        out = frozenset(part)
        inside = [i for i in range(len(domains)) if i not in out]
        model = _fit_router(
            feature[inside], [domains[i] for i in inside], [subdomains[i] for i in inside], level2, seed
        )
        unseen.append(
            _RouterFold(model, part, feature[part], [domains[i] for i in part], [subdomains[i] for i in part])
        )
    plain = [Route("", "", 0.0, 0.0)] * len(domains)
    routes = list(plain)
    for fold in unseen:
        calibrated = _calibrate_router(fold.router, [other for other in unseen if other is not fold])
        before, after = fold.router.route(fold.feature), calibrated.route(fold.feature)
        for i, *found in zip(fold.members, before, after, strict=True):
            plain[i], routes[i] = found
    right = [r.subdomain == s and r.domain == d for r, s, d in zip(routes, subdomains, domains, strict=True)]
    threshold = 0.0 if precision is None else abstention_threshold([r.confidence for r in routes], right, precision)
    fitted = _calibrate_router(_fit_router(feature, domains, subdomains, level2, seed), unseen)
    router = replace(fitted, threshold=threshold, feature=kind)
    figures = {
        "documents": len(domains),
        "domain_accuracy": float(np.mean([r.domain == d for r, d in zip(routes, domains, strict=True)])),
        "subdomain_accuracy": float(np.mean(right)),
        **calibration_errors(routes, domains, subdomains),
        "without_temperature": calibration_errors(plain, domains, subdomains),
        "temperature": router.domain.temperature,
        "subdomain_temperatures": {d: level.temperature for d, level in router.subdomain.items()},
        "threshold": threshold,
        "abstained": float(np.mean([r.confidence < threshold for r in routes])),
        "measured": "5-fold, on reference documents that the routing model did not see",
        **routing_latency(router, feature),
    }
    return router, figures


def train_on_subdomains(
    divided: Mapping[str, DomainDivision],
    feature: Mapping[str, Tensor],
    keys: Mapping[str, Sequence[str]],
    section: RouterSection,
    *,
    kind: str,
    seed: int,
) -> tuple[DomainRouter, dict[str, Any]]:
    """`train_router` on the reference documents of several domains, each divided into its subdomains.

    By domain: its division, its documents' features ``(D, H)`` and their content keys.
    """
    return train_router(
        torch.cat([feature[name] for name in divided]),
        [name for name, part in divided.items() for _ in part.labels],
        [part.names[k] for part in divided.values() for k in part.labels],
        [key for name in divided for key in keys[name]],
        section,
        kind=kind,
        seed=seed,
    )


def calibration_errors(routes: Sequence[Route], domains: Sequence[str], subdomains: Sequence[str]) -> dict[str, float]:
    """Expected calibration error of the domain, and of the whole route down to the subdomain."""
    right_domain = [r.domain == d for r, d in zip(routes, domains, strict=True)]
    right = [r.subdomain == s and ok for r, s, ok in zip(routes, subdomains, right_domain, strict=True)]
    return {
        "domain_ece": expected_calibration_error([r.domain_confidence for r in routes], right_domain),
        "subdomain_ece": expected_calibration_error([r.confidence for r in routes], right),
    }


def routing_latency(router: DomainRouter, feature: Tensor, repeats: int = 200) -> dict[str, float]:
    """p50 and p95 milliseconds to route one feature vector, the embedding itself left out."""
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        router.route(feature[i % len(feature)][None])
        times.append((time.perf_counter() - start) * 1000)
    return {"p50_ms": float(np.quantile(times, 0.5)), "p95_ms": float(np.quantile(times, 0.95))}
