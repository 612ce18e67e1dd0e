"""Which gains the significance test of a build can find, said before anything is fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from freemoe.core.errors import DataError
from freemoe.core.numbers import format_decimals
from freemoe.domain_experts.candidates import SALIENCY, Subdomain, competing_methods, make_subdomains
from freemoe.domain_experts.context import BuildContext
from freemoe.domain_experts.rank.bands import band_grid
from freemoe.domain_experts.route.subdomains import DomainDivision
from freemoe.domain_experts.select.choice import required_documents
from freemoe.domain_experts.structured.fitting import UNITS
from freemoe.evals.statistics import detectable_effect, detectable_gain
from freemoe.evals.summary import is_text


def check_division(context: BuildContext, divided: dict[str, DomainDivision]) -> None:
    """Say what was merged and what cannot be proven, before anything is calibrated or searched.

    Raises:
        DataError: When documents are too few to purify, or to prove a gain in any subdomain.
    """
    for part in divided.values():
        for note in part.notes:
            context.progress.say(f"note: {note}")
    subdomains = make_subdomains(context, divided)
    fitted = {SALIENCY, UNITS} & set(competing_methods(context.recipe))
    for sub in subdomains:
        if fitted and not all(sub.parts):
            raise DataError(
                f"Subdomain {sub.name!r} has {len(sub.split)} reference documents of "
                f"{len({d.key for d in sub.split.documents})} keys or groups: too few to give gradients, to stop and to guard. "
                "Raise --limit, use fewer subdomains (--subdomains), or group otherwise (--group-by)."
            )
    if context.recipe.search.select == "guarded":
        _say_what_can_be_proven(context, subdomains)


def _say_what_can_be_proven(context: BuildContext, subdomains: list[Subdomain]) -> None:
    """Say which gain the guard finds four times in five, and what would lower it; refuse where it could find none at all."""
    recipe, metrics = context.recipe, competing_methods(context.recipe)
    alpha, tests = recipe.search.alpha, len(metrics) * len(subdomains)
    said, hopeless = [], []
    for metric in metrics:
        fitted = metric in (SALIENCY, UNITS)
        guards = 1 - recipe.saliency.gradient_share - recipe.saliency.stop_share if fitted else 1.0
        bands = 1 if fitted else len(band_grid(recipe.bands, metric, recipe.seed))
        # A test that has all scores counts alike candidates as one, and unrelated ones each; another counts each.
        counted = (1, bands) if bands > 1 and recipe.search.method == "exhaustive" else (bands,)
        needed = required_documents(tests * counted[0], alpha)
        for domain, data in context.domains.items():
            counts = {
                s.name: len({s.split.documents[i].key for i in (s.guard_indices if fitted else range(len(s.split)))})
                for s in subdomains
                if s.domain == domain
            }
            hopeless += [
                f"{name}, {metric}: {count} different documents test it, and by itself no gain on so few can be proven at alpha {alpha} among "
                f"{tests} tests; {math.ceil(needed / guards)} reference documents would do"
                for name, count in counts.items()
                if count < needed
            ]
            if tested := [count for count in counts.values() if count >= needed]:
                gain = partial(
                    _format_detectable_gain, is_text(data.reference.documents), [alpha / count for count in counted]
                )
                now, less = gain(tests, tested), {"twice the documents": gain(tests, [2 * count for count in tested])}
                if len(counts) > 1:
                    less["no subdomains"] = gain(len(metrics) * len(context.domains), [sum(counts.values())])
                alike = f"; the more alike the {bands} candidates, the less" if counted[1:] else ""
                said.append(
                    f"power: {domain}, {metric}: a true gain of {now} is accepted with a chance of 80 % ({_format_range(tested, 0)} "
                    f"documents test it, {tests} tests share alpha {alpha}{alike}); "
                    + ", ".join(f"with {what} {lower}" for what, lower in less.items())
                )
    if not said:
        raise DataError(
            "No subdomain has enough reference documents for the guard to prove any gain:\n  "
            + "\n  ".join(hopeless)
            + "\nRaise --limit, use fewer subdomains (--subdomains) or fewer metrics (--metric), or choose without a guard "
            "(--select argmax)."
        )
    for line in [*said, *(f"warning: {line}" for line in hopeless)]:
        context.progress.say(line)


def _format_detectable_gain(text: bool, alphas: Sequence[float], tests: int, documents: Sequence[int]) -> str:
    """The gain that one of so many tests finds with a chance of 80 %, over subdomains of so many documents."""
    found = [(detectable_effect if text else detectable_gain)(n, alpha / tests) for n in documents for alpha in alphas]
    if text:
        return _format_range(found, 2) + " standard deviations between documents"
    return _format_range([100 * gain for gain in found], 0) + " points"


def _format_range(values: Sequence[float], places: int) -> str:
    """The smallest and the largest, or one where they read the same."""
    return " to ".join(dict.fromkeys(format_decimals(value, places) for value in (min(values), max(values))))
