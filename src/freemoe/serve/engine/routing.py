"""Which expert a prompt gets from the router, and how sure it is; run on the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from freemoe.core.errors import DataError
from freemoe.domain_experts.route.subdomains import prompt_feature
from freemoe.evals.engine.answering import BASE


@dataclass(frozen=True)
class RoutedPrompt:
    """A prompt and who continues it."""

    ids: tuple[int, ...]
    expert: str  # Who continues it; of the router ``base`` where that is not sure enough
    # Of the most likely subdomain, also where it is too low; None where nobody asked the router
    confidence: float | None = None


def route_prompts(host: Any, prompts: Sequence[Sequence[int]], known: Sequence[str] = ()) -> list[RoutedPrompt]:
    """What the router says of prompts, as `FreeMoE.generate_text` would take it."""
    if getattr(host, "router", None) is None:
        raise DataError(
            "There is no router here, so that 'auto' cannot pick. Name an expert, or serve an artefact that has a router."
        )
    found = []
    for ids in prompts:
        [(name, route)] = host.route(torch.tensor([list(ids)]))
        # A prompt without tokens of its own has no confidence at all.
        if name == BASE and route.subdomain in known and route.confidence > 0 and not host.router.abstains(route):
            name = route.subdomain
        found.append(RoutedPrompt(tuple(ids), name, round(float(route.confidence), 6)))
    return found


def subdomain_probabilities(host: Any, ids: Sequence[int]) -> list[tuple[str, float]]:
    """Every subdomain with its probability, the likeliest first; empty for a prompt without tokens of its own."""
    special = set(getattr(host.tokenizer, "all_special_ids", None) or [])
    own = [token for token in ids if token not in special]
    if not own:
        return []
    router = host.router
    with host.expert(BASE):
        x = router.standardise_features(prompt_feature(host.model, own, router.feature).cpu()[None])
    first = router.domain.probabilities(x)[0].tolist()
    found: list[tuple[str, float]] = []
    for domain, share in zip(router.domain.classes, first, strict=True):
        level = router.subdomain[domain]
        second = level.probabilities(x)[0].tolist()
        found += [(name, share * p) for name, p in zip(level.classes, second, strict=True)]
    return sorted(found, key=lambda row: -row[1])
