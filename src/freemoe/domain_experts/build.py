"""`build`: from a recipe to proven experts.

Recipe -> domains -> subdomains -> calibration -> candidates -> guarded choice -> router -> artefact -> evidence: steps
1-7 of Free-MoE / MoDE, each in its own room; this file only puts them in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from freemoe import __version__
from freemoe.artifacts import write_manifest
from freemoe.domain_experts.calibrate import Norms, calibrate
from freemoe.domain_experts.candidates import choose_all, make_expert, make_subdomains, purify_all
from freemoe.domain_experts.card import model_card
from freemoe.domain_experts.evidence import overall
from freemoe.domain_experts.importance import METRICS
from freemoe.domain_experts.results import reported_evidence
from freemoe.domain_experts.router import Router, train_router
from freemoe.domain_experts.subdomains import Subdomains, divide, features
from freemoe.domain_experts.workbench import Workbench, prepare
from freemoe.errors import DataError
from freemoe.evals.documents import FrozenChoice, digest_documents
from freemoe.recipes import BuildRecipe, dump
from freemoe.runs import Progress, RunFolder, digest, environment, peak_memory_bytes, write_atomic


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
    try:
        bench = prepare(recipe, progress)
    except BaseException:
        run.discard_if_idle()
        raise
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
    subdomains = make_subdomains(bench, divided, norms)
    purify_all(bench, run, subdomains)
    choose_all(bench, subdomains)
    experts = [make_expert(bench, s) for s in subdomains]
    router, routing = _router(bench, divided, feature)

    folder = run.partial
    write_atomic(folder / "experts.safetensors", save({k: v for e in experts for k, v in e.to_tensors().items()}))
    write_atomic(folder / "router.safetensors", save(router.to_tensors()))
    write_atomic(folder / "recipe.yaml", dump(recipe).encode())
    # From here on nothing is chosen any more, so the reported documents may be opened.
    choice = FrozenChoice(hashlib.sha256((folder / "experts.safetensors").read_bytes()).hexdigest())

    reported = reported_evidence(bench, divided, subdomains, experts, router, choice)
    result = {
        "format": 1,
        "kind": "domain-experts",
        "freemoe": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": recipe.model_dump(mode="json"),
        "base": _base_facts(bench),
        "domains": reported,
        "overall": overall(reported, recipe.seed),
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


def _same_inputs(bench: Workbench, run: RunFolder) -> None:
    """Write down what the run reads; a resumed run must read the same base and documents."""
    now = {
        "base model": bench.fingerprint,
        "reference documents": {n: digest_documents(d.reference.documents) for n, d in bench.domains.items()},
        "reported documents": {n: d.reported.digest() for n, d in bench.domains.items()},
        "tokens": {n: digest(bench.rows(d.reference.documents)) for n, d in bench.domains.items()},
    }
    then = run.journal.unit("inputs", lambda: now)
    for what, value in now.items():
        if then[what] != value:
            raise DataError(
                f"The unfinished run at {str(run.partial)!r} was started with another {what}. Put it back, or start over "
                "with --no-resume."
            )


def _base_facts(bench: Workbench) -> dict[str, Any]:
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


def _calibrate(bench: Workbench, run: RunFolder, divided: dict[str, Subdomains]) -> Norms:
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


def _router(
    bench: Workbench, divided: dict[str, Subdomains], feature: dict[str, Tensor]
) -> tuple[Router, dict[str, Any]]:
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


def interrupted(recipe: BuildRecipe) -> str:
    """What to tell someone who stopped a build."""
    partial = Path(recipe.output + ".partial")
    with contextlib.suppress(OSError):
        if (partial / "journal.jsonl").exists():
            return f"Stopped. Finished work is kept in {str(partial)!r}; run the same command again to go on."
    return "Stopped before any unit of work was finished."
