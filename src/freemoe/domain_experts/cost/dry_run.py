"""`--dry-run`: what a build would do, counted on the real data, timed on one real batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from freemoe.core.run.places import executor_spec_of
from freemoe.core.run.progress import CollectingProgress
from freemoe.domain_experts.candidates import SALIENCY, competing_methods
from freemoe.domain_experts.context import BuildContext, prepare_context
from freemoe.domain_experts.cost.memory import FITTED, fitting_devices, stage_peaks
from freemoe.domain_experts.prove.power import check_division
from freemoe.domain_experts.purify.methods import method_of
from freemoe.domain_experts.rank.bands import band_grid
from freemoe.domain_experts.rank.importance import METRICS
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.domain_experts.route.subdomains import divide_domain, prompt_features
from freemoe.domain_experts.structured.fitting import UNITS, documents_to_fit
from freemoe.evals.summary import is_text
from freemoe.evals.tasks.documents import Document
from freemoe.models.checkpoints.placement import free_bytes
from freemoe.models.offload import resident_bytes
from freemoe.models.precision import compute_dtype

# Documents of every domain that are scored to know what one takes: few enough for a large base on a processor.
_WARM, _TIMED = 2, 16


def plan_build(recipe: BuildRecipe) -> dict[str, Any]:
    """Count units of work, memory and time of a build; loads data and base, writes nothing.

    Returns:
        Plain data in the order to print it; the last word of a key is its unit: ``memory_bytes``, ``time_seconds``; ``warnings``
        are the lines that the build would say.

    Raises:
        FreeMoEError: What the build would raise before its first unit of work.
    """
    said, began = CollectingProgress(), time.perf_counter()
    context = prepare_context(recipe, said)
    loading = time.perf_counter() - began
    fitted = any(METRICS.get(m).needs == "gradients" for m in recipe.search.metrics)
    divided, reference, reported, units, purified = {}, 0, 0, 0.0, 0.0
    for name, data in context.domains.items():
        ids = [context.scorer.prompt_ids(d) for d in data.reference.documents]
        feature = prompt_features(context.model, ids, recipe.subdomains.feature)
        part = divided[name] = divide_domain(name, data.reference, feature, recipe.subdomains, recipe.seed)
        reference += len(data.reference)
        reported += len(data.reported)
        of_units, of_weights = _documents_to_fit(context, data.reference.documents, part.labels, fitted)
        units, purified = units + of_units, purified + of_weights
    check_division(context, divided)
    subdomains = sum(len(part.names) for part in divided.values())
    bands = sum(
        len(band_grid(recipe.bands, m, recipe.seed))
        for m in recipe.search.metrics
        if METRICS.get(m).needs != "gradients"
    )
    # Halving scores everything on an eighth or so, and half as many candidates on twice as much each round.
    share = 1.0 if recipe.search.method == "exhaustive" else min(1.0, (2 + math.log2(max(2, bands))) / max(1, bands))
    tested = len({UNITS, SALIENCY} & set(competing_methods(recipe)))
    guard = 1 - recipe.saliency.gradient_share - recipe.saliency.stop_share
    search = reference * ((1 + bands * share if bands else guard) + tested * guard)
    # Documents scored once, by stage; a stage that is left out takes none.
    documents = {
        "calibration": reference * any(METRICS.get(m).needs == "norms" for m in recipe.search.metrics),
        "structured_purification": units,
        "signed_purification": purified,
        "search": search,
        "report": 2 * reported,
        "report_controls": recipe.evidence.controls * reported,
        "report_oracle": recipe.evidence.oracle * (bands + tested) * reported,
    }
    per_document = _seconds_per_document(context)
    stages_seconds = {stage: per_document * count for stage, count in documents.items() if count}
    # What a method from elsewhere takes, no one knows: as much as the greater of these two.
    ways = (recipe.saliency.method,) if recipe.saliency.method in FITTED else FITTED
    stages = ("scoring", *(("calibration", "band search") if bands else ()), *(ways if fitted else ()), "report")
    return {
        "documents": {
            n: {"reference": len(d.reference), "reported": len(d.reported)} for n, d in context.domains.items()
        },
        "splits": [note for d in context.domains.values() for note in d.notes],
        "warnings": said.lines,
        "subdomains": subdomains,
        "bands_per_subdomain": bands,
        "candidate_bands": subdomains * bands,
        "purifications": subdomains * fitted,
        "document_scores_to_search": round(search),
        "document_scores_to_report": round(sum(n for stage, n in documents.items() if stage.startswith("report"))),
        **_estimate_memory(context, stages),
        "time_of_one_document_seconds": per_document,
        "time_by_stage_seconds": {"loading": loading, **stages_seconds},
        "time_of_one_worker_seconds": loading + sum(stages_seconds.values()),
        "output": recipe.output,
    }


def _documents_to_fit(
    context: BuildContext, documents: Sequence[Document], labels: Sequence[int], purify: bool
) -> tuple[float, float]:
    """Cost of what is fitted to a domain's subdomains, units and single weights, as documents scored once."""
    section, saliency, text = context.recipe.units, context.recipe.saliency, is_text(documents)
    units = weights = 0.0
    for number in dict.fromkeys(labels) if section.unit or purify else ():
        members = [d for d, label in zip(documents, labels, strict=True) if label == number]
        tokens = sum(len(answer) for _, answer in context.answer_rows(members))
        if section.unit:
            shares = (saliency.stop_share, saliency.gradient_share)
            units += documents_to_fit(section, *shares, len(members), tokens)
        if purify:
            weights += method_of(saliency, text, context.weights).cost(saliency, text, len(members), tokens)
    return units, weights


def _estimate_memory(context: BuildContext, stages: Sequence[str]) -> dict[str, Any]:
    """The base and the largest moment of every stage above it, beside the libraries, and on what that fits."""
    recipe = context.recipe
    base = resident_bytes(context.model)
    compute = compute_dtype(recipe.saliency.compute, context.model)
    # Purification multiplies copies where it does so in another format.
    copies = 0 if compute is None else sum(w.size * compute.itemsize for w in context.weights)
    texts = [is_text(d.reference.documents) for d in context.domains.values()]
    step = max(recipe.saliency.text_step if text else recipe.saliency.step for text in texts)
    peaks = stage_peaks(
        context.model, context.weights, recipe.batch_tokens, recipe.bands.ratio, recipe.saliency.budget, step
    )
    above = {stage: peaks[stage].expected + copies * (stage in FITTED) for stage in stages}
    total = base + max(above.values())
    place = executor_spec_of(recipe)
    workers = place.workers or 1
    if place.is_parallel:
        # Each has the base and a stage of its own; the process that they work for has the base too.
        total = base + workers * total
    here = ", or this machine" if total < free_bytes(context.model.device) + base else ""
    return {
        "workers": workers,
        "memory_bytes": round(total),
        "base_bytes": round(base),
        "above_the_base_bytes": {stage.replace(" ", "_"): round(size) for stage, size in above.items()},
        "fits": fitting_devices(total) + here,
    }


def _seconds_per_document(context: BuildContext) -> float:
    """Time of scoring some documents; the first few warm up, the others are measured."""
    elapsed, scored = 0.0, 0
    for count in (_WARM, _TIMED):
        start, scored = time.perf_counter(), 0
        for name, data in context.domains.items():
            documents = data.reference.documents[:count]
            context.evaluators[name].score(documents)
            scored += len(documents)
        elapsed = time.perf_counter() - start
    return elapsed / scored
