"""The reported split, scored for the artefact as it was written, and put into words and plain data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from freemoe.core.files import json_digest
from freemoe.core.numbers import format_percent
from freemoe.domain_experts.ahead import ParallelBuildStages
from freemoe.domain_experts.candidates import Subdomain, SubdomainChoice
from freemoe.domain_experts.context import BuildContext, MakeMask
from freemoe.domain_experts.expert import DomainExpert
from freemoe.domain_experts.prove.evidence import domain_evidence, where_off
from freemoe.domain_experts.rank.random_mask import random_mask
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.domain_experts.route.contents import describe_subdomains
from freemoe.domain_experts.route.router import DomainRouter, calibration_errors
from freemoe.domain_experts.route.subdomains import DomainDivision, prompt_features
from freemoe.domain_experts.select.choice import MOST_MUCH_WORSE
from freemoe.domain_experts.structured.evidence import cut_evidence, largest_harmless, unit_evidence
from freemoe.domain_experts.structured.fitting import UNITS, FoundUnits
from freemoe.evals.engine.evaluator import DocumentScore
from freemoe.evals.guessing import against_guessing, vocabulary_of
from freemoe.evals.statistics import HEAVY_LOSS
from freemoe.evals.summary import is_text
from freemoe.evals.tasks.documents import Document, FrozenChoice
from freemoe.models.mask import Mask


def reported_evidence(
    context: BuildContext,
    divided: dict[str, DomainDivision],
    choices: list[SubdomainChoice],
    experts: list[DomainExpert],
    router: DomainRouter,
    choice: FrozenChoice,
    ahead: ParallelBuildStages | None = None,
) -> list[dict[str, Any]]:
    """Score the reported split in every row, domain by domain; those ahead do that, if there are any."""
    recipe = context.recipe
    # Regenerated from what is written to disk, so that the report is about the artefact.
    stored = {k: v for e in experts for k, v in e.to_tensors().items()}
    accepted: dict[str, MakeMask] = {
        e.name: partial(DomainExpert.from_parts(e.manifest_entry(), stored).mask, context.weights)
        for e in experts
        if e.kind != "base"
    }
    by_name = {c.subdomain.name: c for c in choices}

    found = []
    with context.progress.stage("report", len(divided)) as advance:
        done = ahead.run_stage("report", list(divided), lambda name: advance(1)) if ahead else set()
        for domain, part in divided.items():
            documents = context.domains[domain].reported.open(choice)
            feature = prompt_features(
                context.model, [context.scorer.prompt_ids(d) for d in documents], recipe.subdomains.feature
            )
            seen = router.route(feature)
            routes = [("base" if router.abstains(r) else r.subdomain, r.subdomain, r.confidence) for r in seen]
            known = part.assign_documents(documents, feature)
            candidates = {
                n: {c: partial(sub.candidate_mask, c) for c in sub.candidates}
                for n, sub in ((n, by_name[n].subdomain) for n in part.names)
            }
            evidence = domain_evidence(
                documents,
                known,
                part.names,
                routes,
                accepted,
                candidates if recipe.evidence.oracle else {},
                partial(_control_mask, context, by_name, accepted),
                recipe.evidence.controls,
                lambda unit, off, docs, domain=domain: context.reported_scores(domain, unit, off, docs),
                recipe.search.select == "guarded",
            )
            right, score = [entry["base"] for entry in evidence["documents"]], evidence["rows"]["base"]["score"]
            evidence["guessing"] = against_guessing(documents, right, score, vocabulary_of(context.model))
            evidence["router"] |= calibration_errors(seen, [domain] * len(seen), [part.names[k] for k in known])
            found.append(_domain_result(context, domain, part, by_name, accepted, evidence))
            for k, (name, entry) in enumerate(zip(part.names, found[-1]["subdomains"], strict=True)):
                sub = by_name[name].subdomain
                if sub.units is not None:
                    own = [d for d, number in zip(documents, known, strict=True) if number == k]
                    entry["units"] = _units_of(context, sub, sub.units, own)
            for name in part.names:
                by_name[name].subdomain.rankings.clear_cache()
            advance(0 if domain in done else 1)
    return found


def _control_mask(
    context: BuildContext, by_name: dict[str, SubdomainChoice], accepted: dict[str, MakeMask], name: str, number: int
) -> Mask:
    """One random draw as large as what the expert of a subdomain has off."""
    values = {w.name: w.read_values for w in context.weights}
    accepted_one, units, seed = (
        by_name[name].accepted,
        by_name[name].subdomain.units,
        _seed_of_draw(context, name, number),
    )
    matched = partial(random_mask, seed=seed, values=lambda weight: values[weight]())
    if units is not None and accepted_one is not None and accepted_one.candidate == UNITS:
        # Random units, and where single weights are off too, as many random ones beside them.
        return units.units.mask(units.random_units(units.best_index, seed)).union(matched(units.singles))
    return matched(accepted[name]())


def _seed_of_draw(context: BuildContext, subdomain: str, number: int) -> int:
    """Seed of a control's draw; subdomains share none, so that their draws are independent."""
    return int(json_digest([context.recipe.seed, subdomain, number]), 16)


def _units_of(
    context: BuildContext, sub: Subdomain, units: FoundUnits, documents: Sequence[Document]
) -> dict[str, Any]:
    """The curve of a subdomain's units on its reported documents, and what cutting them saves."""
    recipe, guard = context.recipe, [sub.split.documents[i] for i in sub.guard_indices]

    def score_reported(unit: str, off: MakeMask, docs: Sequence[Document]) -> Sequence[DocumentScore]:
        return context.reported_scores(sub.domain, f"curve {sub.name} {unit}", off, docs)

    def score_guard(unit: str, off: MakeMask, docs: Sequence[Document]) -> Sequence[DocumentScore]:
        return context.score_documents(sub.domain, f"{sub.name}|curve {unit}", off, docs)

    seeds = [_seed_of_draw(context, sub.name, number) for number in range(recipe.evidence.controls)]
    found = unit_evidence(units, documents, score_reported, seeds)
    found |= largest_harmless(units, guard, score_guard, recipe.units.margin)
    return {**found, "layout": recipe.units.layout, "cut": cut_evidence(context.model, units)}


def _domain_result(
    context: BuildContext,
    domain: str,
    part: DomainDivision,
    by_name: dict[str, SubdomainChoice],
    accepted: dict[str, MakeMask],
    evidence: dict[str, Any],
) -> dict[str, Any]:
    data = context.domains[domain]
    subdomains = []
    for name, held in zip(part.names, describe_subdomains(data.reference.documents, part), strict=True):
        choice, sub = by_name[name], by_name[name].subdomain
        off = accepted.get(name, Mask)()
        best = max(choice.verdicts, key=lambda v: v.gain)
        shown = off or sub.candidate_mask(best.candidate)
        subdomains.append(
            {
                "name": name,
                "reference_documents": len(sub.split),
                "holds": held,
                "chosen": choice.accepted.candidate if choice.accepted else "base",
                "verdict": _verdict_in_words(choice, context.recipe),
                "verdicts": [vars(v) for v in choice.verdicts],
                "off": off.count,
                "off_share": off.off_share(context.weights),
                "where_off": where_off(shown, context.weights),
                "where_off_is": "chosen" if off else f"best candidate, turned down: {best.candidate}",
                "purification_curve": sub.stopping_losses,
                "forecast": sub.switches.forecast.model_dump() if sub.switches and sub.switches.forecast else None,
                "bands": {n: [b.metric, b.start, b.end] for n, b in sub.bands.items()},
                **evidence["subdomains"].get(name, {"rows": {}, "candidates": {}}),
            }
        )
    metrics = dict.fromkeys(grader.metric for grader in data.graders.values())
    text = "ratio" in evidence["rows"]["base"]
    return {
        "name": domain,
        "metric": "perplexity" if text else ", ".join(metrics),
        "unit": "perplexity" if text else "points",
        "notes": list(data.notes) + list(part.notes),
        "by": part.by,
        "reference_documents": len(data.reference),
        "reported_documents": len(data.reported),
        "rows": evidence["rows"],
        "tasks": evidence["tasks"],
        **({"guessing": evidence["guessing"]} if evidence["guessing"] else {}),
        "router": evidence["router"],
        "subdomains": subdomains,
        "documents": evidence["documents"],
    }


def _verdict_in_words(choice: SubdomainChoice, recipe: BuildRecipe) -> str:
    best = choice.accepted or min(choice.verdicts, key=lambda v: (v.holm if v.holm is not None else 1.0, -v.gain))
    unit = "nats per token" if is_text(choice.subdomain.split.documents) else "points"
    gain = best.gain if unit != "points" else 100 * best.gain
    shown = f"{best.candidate}: {gain:+.2f} {unit} on {best.tested} documents of the selection split, Holm p = {best.holm:.2g}"
    if best.much_worse > MOST_MUCH_WORSE:
        shown += f"; {format_percent(best.much_worse)} of them lost more than {HEAVY_LOSS:g} nat per token"
    if choice.accepted is not None:
        return (
            f"{choice.accepted.candidate} accepted ({shown})"
            if recipe.search.select == "guarded"
            else f"argmax ({shown})"
        )
    return f"no reliable gain ({shown})"
