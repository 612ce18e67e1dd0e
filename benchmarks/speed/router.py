"""T11: how often the router finds a prompt's domain, and what it adds to a prompt's latency.

Trained on reference documents; the reported documents are opened for the trained router.
"""

from __future__ import annotations

import hashlib
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from benchmarks.gain.materials import MODEL
from benchmarks.harness import Figure, Outcome, Settings
from freemoe.domain_experts.demo import demo_recipe
from freemoe.domain_experts.recipe import BuildRecipe, RouterSection
from freemoe.domain_experts.route.router import (
    DomainRouter,
    Level,
    calibration_errors,
    routing_latency,
    train_on_subdomains,
)
from freemoe.domain_experts.route.subdomains import divide_domain, prompt_features
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import FrozenChoice
from freemoe.evals.tasks.domains import load_domains
from freemoe.models.checkpoints.loading import load_base

_ACCURACY, _LATENCY = 95.0, 1.0
_LIMIT, _QUICK_LIMIT = 500, 60
_WIDE, _DOMAINS, _SUBDOMAINS = 4096, 3, 8


def run(settings: Settings) -> Outcome:
    """Domain accuracy on reported documents, and p95 milliseconds per prompt beyond the embedding."""
    limit = _QUICK_LIMIT if settings.quick else None
    cases = {"demo": demo_recipe("unused", settings.seed, limit)}
    if settings.data_root is not None:
        cases["stories260k on real tasks"] = real_recipe(settings.data_root, settings.seed, limit or _LIMIT)
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    with settings.progress.stage("router", len(cases) + 1) as advance:
        for name, recipe in cases.items():
            found, details[name] = _case(name, recipe, settings.rounds)
            figures += found
            advance(1)
        wide = wide_router(settings.seed)
        feature = torch.randn(64, _WIDE, generator=torch.Generator().manual_seed(settings.seed))
        details["wide"] = _latency(wide, feature, settings.rounds)
        case = f"{_WIDE} features, {_DOMAINS} x {_SUBDOMAINS} subdomains"
        figures.append(_latency_figure(case, details["wide"]))
        advance(1)
    return Outcome(tuple(figures), details)


def real_recipe(root: Path, seed: int, limit: int) -> BuildRecipe:
    """Three domains of published benchmarks for a real small model; only their prompts are read."""
    return BuildRecipe.model_validate(
        {
            "model": str(root / MODEL),
            "domains": {"math": ["gsm8k", "mathqa"], "code": ["mbpp"], "general": ["mmlu"]},
            "seed": seed,
            "dtype": "float32",
            # Loading code tasks asks for it; nothing is generated and so nothing runs.
            "data": {"root": str(root), "limit": limit, "allow_code_execution": True},
        }
    )


def wide_router(seed: int) -> DomainRouter:
    """A router of a 7B model's width with drawn weights: its latency does not depend on them."""
    generator = torch.Generator().manual_seed(seed)

    def level(classes: list[str]) -> Level:
        drawn = torch.randn(len(classes), _WIDE + 1, generator=generator)
        return Level(tuple(classes), drawn[:, 1:].contiguous(), drawn[:, 0].contiguous())

    domains = [f"d{i}" for i in range(_DOMAINS)]
    levels = {d: level([f"{d}/{k}" for k in range(_SUBDOMAINS)]) for d in domains}
    return DomainRouter(torch.zeros(_WIDE), torch.ones(_WIDE), level(domains), levels, 0.5)


def _latency(router: DomainRouter, feature: torch.Tensor, rounds: int) -> dict[str, float]:
    """Percentiles of 200 prompts each, median over the rounds."""
    found = [routing_latency(router, feature) for _ in range(rounds)]
    return {key: statistics.median(f[key] for f in found) for key in found[0]}


def _latency_figure(case: str, found: dict[str, float]) -> Figure:
    note = f"p50 {found['p50_ms']:.3f} ms"
    return Figure(f"p95 per prompt beyond the embedding, {case}", found["p95_ms"], _LATENCY, "lower", " ms", 3, note)


def _case(case: str, recipe: BuildRecipe, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    model, tokenizer = load_base(recipe.model, recipe.revision, recipe.dtype, recipe.device)
    scorer = Scorer(model, tokenizer)
    domains = load_domains(recipe, tokenizer)
    kind = recipe.subdomains.feature
    feature, divided, keys = {}, {}, {}
    for name, data in domains.items():
        documents = data.reference.documents
        feature[name] = prompt_features(model, [scorer.prompt_ids(d) for d in documents], kind)
        divided[name] = divide_domain(name, data.reference, feature[name], recipe.subdomains, recipe.seed)
        keys[name] = [d.key for d in documents]

    details: dict[str, Any] = {}
    trained: dict[str, tuple[DomainRouter, dict[str, Any]]] = {}
    for level2 in ("linear", "centroid"):
        section = RouterSection(level2=level2, precision=recipe.router.precision)
        trained[level2] = train_on_subdomains(divided, feature, keys, section, kind=kind, seed=recipe.seed)
        details[level2] = {"reference": trained[level2][1], "reported": {}}
    choice = FrozenChoice(hashlib.sha256(save(trained["linear"][0].to_tensors())).hexdigest())

    right: dict[str, list[bool]] = {}
    for name, data in domains.items():
        documents = data.reported.open(choice)
        found = prompt_features(model, [scorer.prompt_ids(d) for d in documents], kind)
        known = [divided[name].names[k] for k in divided[name].assign_documents(documents, found)]
        for level2, (router, _) in trained.items():
            routes = router.route(found)
            # Level 1 is the same whatever level 2 is.
            right[name] = [r.domain == name for r in routes]
            details[level2]["reported"][name] = {
                "documents": len(documents),
                "domain_accuracy": float(np.mean(right[name])),
                "subdomain_accuracy": float(np.mean([r.subdomain == k for r, k in zip(routes, known, strict=True)])),
                "abstained": float(np.mean([router.abstains(r) for r in routes])),
                **calibration_errors(routes, [name] * len(routes), known),
            }
    shares = {name: 100 * float(np.mean(hits)) for name, hits in right.items()}
    worst = min(shares, key=lambda name: shares[name])
    hits = [hit for part in right.values() for hit in part]
    note = f"{len(hits)} reported documents; worst domain {worst} {shares[worst]:.1f} %"
    times = _latency(trained["linear"][0], torch.cat(list(feature.values())), rounds)
    details["latency"] = times
    accuracy = Figure(f"domain accuracy, {case}", 100 * float(np.mean(hits)), _ACCURACY, "higher", " %", 1, note)
    return [accuracy, _latency_figure(f"{case}, {len(feature[worst][0])} features", times)], details
