"""The experts of all tasks behind one router: where it sends each reported question, and what is answered there.

The router is a build's own, trained on the reference documents of all tasks, one domain each. Only answers under another
task's expert are measured here: those under a question's own expert, and the base's, stand in the cells of its task.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.real_llm.data import TASKS, load_parts
from benchmarks.real_llm.methods.weights import Stand, joined
from benchmarks.real_llm.protocol import Job
from freemoe.core.memory import peak_memory_bytes
from freemoe.domain_experts.recipe import RouterSection
from freemoe.domain_experts.route.router import train_on_subdomains
from freemoe.domain_experts.route.subdomains import DomainDivision, prompt_features
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights

FEATURE = "embedding"


def routed(job: Job) -> dict[str, Any]:
    """Route the reported questions of every task; those without an expert yet are the base's.

    Returns:
        ``tasks``: by task its documents' ids, ``picked`` (the likeliest task), ``abstains`` (whether the router leaves them
        to the base) and ``right``, under the expert of the task picked where that is another one that has one, else None;
        ``experts``: the tasks that have; ``router``: its figures.
    """
    model, tokenizer = load_base(job.model, dtype="float32", device="cpu")
    weights = find_weights(model)
    paths = {cell.material: path for cell, path in job.needs}
    names = [t.name for t in TASKS]
    stands = {
        name: Stand(job.cell, job.protocol, model, tokenizer, weights, data)
        for name in names
        for data in [load_parts(name, Path(job.root), tokenizer, job.protocol, job.cell.seed)]
    }
    reference = {n: [*s.data.gradient, *s.data.stop, *s.data.guard] for n, s in stands.items()}
    prompts = {n: [stands[n].scorer.prompt_ids(d) for d in documents] for n, documents in reference.items()}
    feature = {n: prompt_features(model, ids, FEATURE) for n, ids in prompts.items()}
    divided = {
        n: DomainDivision(n, (n,), (0,) * len(rows), rows.mean(0)[None], "none", {n: 0}) for n, rows in feature.items()
    }
    keys = {n: [d.key for d in documents] for n, documents in reference.items()}
    router, figures = train_on_subdomains(divided, feature, keys, RouterSection(), kind=FEATURE, seed=job.cell.seed)
    found = {}
    for name, stand in stands.items():
        documents = stand.data.reported
        routes = router.route(prompt_features(model, [stand.scorer.prompt_ids(d) for d in documents], FEATURE))
        picked = [r.domain for r in routes]
        right: list[float | None] = [None] * len(documents)
        for other in paths:
            astray = [i for i, p in enumerate(picked) if p == other != name]
            if astray:
                # An expert that stopped at its start switches nothing off and left no file.
                kept = [load_file(paths[other])] if Path(paths[other]).exists() else []
                with switched_off(weights, joined(weights, kept)):
                    scores = stand.scores([documents[i] for i in astray])
                for i, score in zip(astray, scores, strict=True):
                    right[i] = score.value
        found[name] = {
            "ids": [d.id for d in documents],
            "picked": picked,
            "abstains": [router.abstains(r) for r in routes],
            "right": right,
        }
    return {"tasks": found, "experts": list(paths), "router": figures, "memory_bytes": peak_memory_bytes()}
