"""`build`: recipe -> domains -> subdomains -> calibration -> candidates -> guarded choice -> router -> artefact -> evidence.

Steps 1-7 of Free-MoE / MoDE, each in its own room; this file only puts them in order.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from freemoe import __version__
from freemoe.artifacts import write_manifest
from freemoe.domain_experts.bands import Band, Rankings, grid
from freemoe.domain_experts.bench import Bench, prepare
from freemoe.domain_experts.calibrate import Norms, calibrate
from freemoe.domain_experts.card import model_card
from freemoe.domain_experts.choice import Verdict, accept, adjust, cross_fit, held_out, shares
from freemoe.domain_experts.evidence import domain_evidence, is_text, where_off
from freemoe.domain_experts.expert import Expert, band_expert, random_positions, switch_expert
from freemoe.domain_experts.importance import METRICS
from freemoe.domain_experts.router import Router, train_router
from freemoe.domain_experts.saliency import purify
from freemoe.domain_experts.scores import ScoreTable
from freemoe.domain_experts.search import SEARCHES
from freemoe.domain_experts.subdomains import Subdomains, divide, features
from freemoe.domain_experts.switching import count, share
from freemoe.errors import DataError
from freemoe.evals.documents import FrozenChoice, ReferenceSplit
from freemoe.recipes import BuildRecipe, dump
from freemoe.runs import Progress, RunFolder, digest, environment, peak_memory_bytes, write_atomic


@dataclass(eq=False)
class Subdomain:
    """One subdomain on its way through the build.

    Attributes:
        name: ``DOMAIN/...``.
        domain: Its domain.
        number: Its number over all domains: the group of the calibration.
        split: Its reference documents.
        bands: Candidates by name.
        rankings: Makes the bands' positions.
        fitted: Positions of the candidate that signed purification found, or None.
        curve: The stopping loss over its rounds.
        guard: Documents that neither fitted nor stopped it.
        verdicts: What each metric's winner showed.
        choice: The accepted one, or None.
    """

    name: str
    domain: str
    number: int
    split: ReferenceSplit
    bands: dict[str, Band]
    rankings: Rankings
    fitted: dict[str, Tensor] | None = None
    curve: tuple[float, ...] = ()
    guard: tuple[int, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    choice: Verdict | None = None

    def positions(self, candidate: str) -> dict[str, Tensor]:
        """Weights that a candidate switches off."""
        if candidate == "base":
            return {}
        if candidate == SALIENCY:
            return self.fitted or {}
        return self.rankings.positions(self.bands[candidate])


SALIENCY = "saliency"


def build(
    recipe: BuildRecipe, *, progress: Progress | None = None, overwrite: bool = False, resume: bool = True
) -> Path:
    """Find, prove and write the domain experts of a base.

    Args:
        recipe: What to build.
        progress: Where to report.
        overwrite: Replace a finished artefact of the same name.
        resume: Go on with an unfinished run of the same recipe.

    Returns:
        The artefact's folder.

    Raises:
        FreeMoEError: Its child that says what is wrong; no folder named like the output is left half written.
    """
    started = time.time()
    run = RunFolder(recipe.output, recipe.model_dump(mode="json"), overwrite=overwrite, resume=resume)
    bench = prepare(recipe, progress)
    bench.run = run
    _same_inputs(bench, run)
    for data in bench.domains.values():
        for note in data.notes:
            bench.progress.say(f"{data.name}: {note}")

    feature = {
        name: features(
            bench.model, [bench.scorer.prompt_ids(d) for d in data.reference.documents], recipe.subdomains.feature
        )
        for name, data in bench.domains.items()
    }
    divided = {
        name: divide(name, data.reference, feature[name], recipe.subdomains, recipe.seed)
        for name, data in bench.domains.items()
    }
    for part in divided.values():
        for note in part.notes:
            bench.progress.say(f"note: {note}")
    norms = _calibrate(bench, run, divided) if _needs_norms(recipe) else None
    subdomains = _subdomains(bench, divided, norms)
    _purify_all(bench, run, subdomains)
    _choose_all(bench, subdomains)
    experts = [_expert(bench, s, norms) for s in subdomains]
    router, routing = _router(bench, divided, feature)

    folder = run.partial
    write_atomic(folder / "experts.safetensors", save({k: v for e in experts for k, v in e.to_tensors().items()}))
    write_atomic(folder / "router.safetensors", save(router.to_tensors()))
    write_atomic(folder / "recipe.yaml", dump(recipe).encode())
    choice = FrozenChoice(digest([e.describe() for e in experts] + [run.journal.path.name]))

    result = {
        "format": 1,
        "kind": "domain-experts",
        "freemoe": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": recipe.model_dump(mode="json"),
        "base": _base_facts(bench),
        "domains": _evidence(bench, divided, subdomains, experts, router, choice),
        "router": routing,
        "environment": environment(),
    }
    result["cost"] = {
        "wall_seconds": time.time() - started,
        "peak_memory_bytes": peak_memory_bytes(),
        "units_done": run.journal.done,
        "units_reused": run.journal.reused,
        "artefact_bytes": sum((folder / f).stat().st_size for f in ("experts.safetensors", "router.safetensors")),
    }
    write_atomic(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    write_atomic(folder / "README.md", model_card(result).encode())
    write_manifest(
        folder,
        {
            "kind": "domain-experts",
            "freemoe_version": __version__,
            "base_model_name_or_path": recipe.model,
            "revision": recipe.revision,
            "base_fingerprint": bench.fingerprint,
            "experts": [e.describe() for e in experts],
            "router": router.describe(),
        },
    )
    return run.publish()


def _needs_norms(recipe: BuildRecipe) -> bool:
    return any(METRICS.get(m).needs == "norms" for m in recipe.search.metrics)


def _same_inputs(bench: Bench, run: RunFolder) -> None:
    """Write down what the run reads; a resumed run must read the same base and documents."""
    now = {
        "base": bench.fingerprint,
        "documents": {n: digest([f"{d.task}/{d.id}/{d.key}" for d in x.reference.documents]) for n, x in bench.domains.items()},
    }
    then = run.journal.unit("inputs", lambda: now)
    if then != now:
        what = "base model" if then["base"] != now["base"] else "reference documents"
        raise DataError(
            f"The unfinished run at {str(run.partial)!r} was started with another {what}. Put it back, or start over with "
            "--no-resume."
        )


def _base_facts(bench: Bench) -> dict[str, Any]:
    return {
        "name": bench.recipe.model,
        "revision": bench.recipe.revision,
        "fingerprint": bench.fingerprint,
        "model_type": bench.model.config.model_type,
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in bench.model.parameters()),
        "weights": sum(w.size for w in bench.weights),
        "layers": 1 + max(w.layer for w in bench.weights),
    }


def _calibrate(bench: Bench, run: RunFolder, divided: dict[str, Subdomains]) -> Norms:
    """One pass over all reference documents for all subdomains and all p."""
    documents, labels, first = [], [], 0
    for name, part in divided.items():
        documents += bench.domains[name].reference.documents
        labels += [first + k for k in part.labels]
        first += len(part.names)

    def work() -> dict[str, Tensor]:
        batches = bench.batches(documents, labels)
        with bench.progress.stage("calibration", len(documents)) as advance:
            found = calibrate(
                bench.model, bench.weights, [(b.ids, b.mask, b.labels) for b in batches], first, on_batch=advance
            )
        return found.to_tensors()

    return Norms.from_tensors(run.tensors("calibration", work))


def _subdomains(bench: Bench, divided: dict[str, Subdomains], norms: Norms | None) -> list[Subdomain]:
    found = []
    recipe = bench.recipe
    for name, part in divided.items():
        for k, subdomain in enumerate(part.names):
            number = len(found)
            members = [i for i, label in enumerate(part.labels) if label == k]
            bands = {
                b.name: b
                for m in recipe.search.metrics
                if METRICS.get(m).needs != "gradients"
                for b in grid(recipe.bands, m, recipe.seed)
            }
            found.append(
                Subdomain(
                    subdomain,
                    name,
                    number,
                    bench.domains[name].reference.take(members),
                    bands,
                    Rankings(bench.weights, _norm_of(norms, number, recipe.bands.p, bench)),
                )
            )
    return found


def _norm_of(norms: Norms | None, number: int, p: str, bench: Bench) -> Callable[[str], Tensor] | None:
    if norms is None:
        return None
    return lambda tap: norms.norm(tap, number, float(p)).to(bench.model.device)


def _purify_all(bench: Bench, run: RunFolder, subdomains: list[Subdomain]) -> None:
    """Signed purification of every subdomain, each a journalled unit."""
    recipe = bench.recipe
    if SALIENCY not in recipe.search.metrics:
        return
    section = recipe.saliency
    with bench.progress.stage("signed purification", len(subdomains)) as advance:
        for sub in subdomains:
            keys = [d.key for d in sub.split.documents]
            gradient, stop, guard = shares(keys, [section.gradient_share, section.stop_share], recipe.seed)
            if not (gradient and stop and guard):
                raise DataError(
                    f"Subdomain {sub.name!r} has {len(keys)} reference documents: too few to give gradients, to stop and to "
                    "guard. Raise --limit, or use fewer subdomains (--subdomains)."
                )
            sub.guard = tuple(guard)
            step = section.text_step if is_text(sub.split.documents) else section.step

            def work(sub: Subdomain = sub, gradient: Any = gradient, stop: Any = stop, step: float = step) -> dict[str, Tensor]:
                import torch

                docs = sub.split.documents
                found = purify(
                    bench.model,
                    bench.weights,
                    bench.batches([docs[i] for i in gradient]),
                    bench.batches([docs[i] for i in stop]),
                    step=step,
                    budget=section.budget,
                    patience=section.patience,
                )
                return {**found.positions, "|curve": torch.tensor(found.losses, dtype=torch.float64)}

            tensors = run.tensors(f"purify|{sub.name}", work)
            sub.curve = tuple(tensors.pop("|curve").tolist())
            sub.fitted = {k: v.to(bench.model.device) for k, v in tensors.items()}
            advance(1)


def _choose_all(bench: Bench, subdomains: list[Subdomain]) -> None:
    """Search each metric's candidates, test the winners on documents that did not choose them, accept the proven."""
    section, seed = bench.recipe.search, bench.recipe.seed
    search = SEARCHES.get(section.method)
    tables = []
    with bench.progress.stage("search", len(subdomains)) as advance:
        for sub in subdomains:

            def compute(candidate: str, numbers: list[int], sub: Subdomain = sub) -> list:
                documents = [sub.split.documents[i] for i in numbers]
                return bench.scores(f"{sub.name}|{candidate}", sub.positions(candidate), documents)

            table = ScoreTable(sub.split, compute)
            tables.append(table)
            verdicts = []
            for metric in section.metrics:
                if metric == SALIENCY:
                    verdicts.append(held_out(table, metric, SALIENCY, sub.guard, seed))
                    continue
                names = [n for n, b in sub.bands.items() if b.metric == metric]
                verdicts.append(cross_fit(table, metric, names, search, section.objective, section.folds, seed))
            sub.verdicts = tuple(verdicts)
            advance(1)
    adjusted = adjust([s.verdicts for s in subdomains])
    for sub, verdicts, table in zip(subdomains, adjusted, tables, strict=True):
        sub.verdicts = tuple(verdicts)
        if section.select == "guarded":
            sub.choice = accept(verdicts, section.alpha)
        else:
            # The papers' rule: the best on the documents that chose it, if it beats the base at all.
            def gain(v: Verdict, table: ScoreTable = table, sub: Subdomain = sub) -> float:
                seen = list(sub.guard) if v.candidate == SALIENCY else range(len(sub.split))
                return sum(table.gains(v.candidate, seen, section.objective)) / len(seen)

            best = max(verdicts, key=gain)
            sub.choice = best if gain(best) > 0 else None


def _expert(bench: Bench, sub: Subdomain, norms: Norms | None) -> Expert:
    if sub.choice is None:
        return Expert(sub.name)
    if sub.choice.candidate == SALIENCY:
        return switch_expert(sub.name, sub.fitted or {})
    band = sub.bands[sub.choice.candidate]
    taps = dict.fromkeys(w.tap for w in bench.weights)
    held = {t: norms.norm(t, sub.number, float(band.p)) for t in taps} if norms is not None else {}
    return band_expert(sub.name, band, sub.rankings.ends(band), held, bench.weights)


def _router(
    bench: Bench, divided: dict[str, Subdomains], feature: dict[str, Tensor]
) -> tuple[Router, dict[str, Any]]:
    import torch

    domains, names, keys = [], [], []
    for domain, part in divided.items():
        domains += [domain] * len(part.labels)
        names += [part.names[k] for k in part.labels]
        keys += [d.key for d in bench.domains[domain].reference.documents]
    section = bench.recipe.router
    return train_router(
        torch.cat(list(feature.values())),
        domains,
        names,
        keys,
        level2=section.level2,
        precision=section.precision,
        kind=bench.recipe.subdomains.feature,
        seed=bench.recipe.seed,
    )


def _evidence(
    bench: Bench,
    divided: dict[str, Subdomains],
    subdomains: list[Subdomain],
    experts: list[Expert],
    router: Router,
    choice: FrozenChoice,
) -> list[dict[str, Any]]:
    """Score the reported split in every row, domain by domain."""
    recipe = bench.recipe
    # Regenerated from what is written to disk, so that the report is about the artefact.
    stored = {k: v for e in experts for k, v in e.to_tensors().items()}
    accepted = {
        e.name: Expert.from_parts(e.describe(), stored).positions(bench.weights) for e in experts if e.kind != "base"
    }
    by_name = {s.name: s for s in subdomains}

    def controls(name: str, number: int) -> dict[str, Tensor]:
        return random_positions(accepted[name], bench.weights, 1000 * (recipe.seed + 1) + number)

    found = []
    with bench.progress.stage("report", len(divided)) as advance:
        for domain, part in divided.items():
            documents = bench.domains[domain].reported.open(choice)
            feature = features(
                bench.model, [bench.scorer.prompt_ids(d) for d in documents], recipe.subdomains.feature
            )
            routes = [
                (r.subdomain if r.confidence >= router.threshold else "base", r.subdomain, r.confidence)
                for r in router.route(feature)
            ]
            candidates = {
                n: {c: _deferred(by_name[n], c) for c in _candidates(by_name[n])} for n in part.names
            }
            evidence = domain_evidence(
                documents,
                part.assign(documents, feature),
                part.names,
                routes,
                accepted,
                candidates if recipe.evidence.oracle else {},
                controls,
                recipe.evidence.controls,
                lambda unit, positions, docs, domain=domain: bench.reported_scores(f"{domain}|{unit}", positions, docs),
                recipe.seed,
            )
            found.append(_domain_result(bench, domain, part, by_name, accepted, evidence))
            advance(1)
    return found


def _candidates(sub: Subdomain) -> list[str]:
    return [*([SALIENCY] if sub.fitted is not None else []), *sub.bands]


def _deferred(sub: Subdomain, candidate: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: sub.positions(candidate)


def _domain_result(
    bench: Bench,
    domain: str,
    part: Subdomains,
    by_name: dict[str, Subdomain],
    accepted: dict[str, dict[str, Tensor]],
    evidence: dict[str, Any],
) -> dict[str, Any]:
    data = bench.domains[domain]
    subdomains = []
    for name in part.names:
        sub = by_name[name]
        off = accepted.get(name, {})
        best = max(sub.verdicts, key=lambda v: v.gain)
        shown = off or sub.positions(best.candidate)
        subdomains.append(
            {
                "name": name,
                "reference_documents": len(sub.split),
                "chosen": sub.choice.candidate if sub.choice else "base",
                "verdict": _verdict_in_words(sub, bench.recipe),
                "verdicts": [vars(v) for v in sub.verdicts],
                "off": count(off),
                "off_share": share(bench.weights, off),
                "where_off": where_off(shown, bench.weights),
                "where_off_is": "chosen" if off else f"best candidate, turned down: {best.candidate}",
                "purification_curve": sub.curve,
                "bands": {n: [b.metric, b.start, b.end] for n, b in sub.bands.items()},
                **evidence["subdomains"].get(name, {"rows": {}, "candidates": {}}),
            }
        )
    metrics = dict.fromkeys(str(getattr(t, "metric", "value")) for t in data.tasks.values())
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
        "subdomains": subdomains,
        "documents": evidence["documents"],
    }


def _verdict_in_words(sub: Subdomain, recipe: BuildRecipe) -> str:
    best = min(sub.verdicts, key=lambda v: (v.holm if v.holm is not None else 1.0, -v.gain))
    unit = "nats per token" if is_text(sub.split.documents) else "points"
    gain = best.gain if unit != "points" else 100 * best.gain
    shown = f"{best.candidate}: {gain:+.2f} {unit} on {best.tested} documents that did not choose it, Holm p = {best.holm:.2g}"
    if sub.choice is not None:
        return f"{sub.choice.candidate} accepted ({shown})" if recipe.search.select == "guarded" else f"argmax ({shown})"
    return f"no reliable gain ({shown})"


def interrupted(recipe: BuildRecipe) -> str:
    """What to tell someone who stopped a build."""
    partial = Path(recipe.output + ".partial")
    with contextlib.suppress(OSError):
        if (partial / "journal.jsonl").exists():
            return f"Stopped. Finished work is kept in {str(partial)!r}; run the same command again to go on."
    return "Stopped before any unit of work was finished."
