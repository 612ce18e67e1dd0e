"""The compact tables of the benchmark: what is committed, without the scores of single documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.pages import grid, interval, size
from benchmarks.real_llm.cells import BASE, Cell
from benchmarks.real_llm.data import MATERIALS
from benchmarks.real_llm.figures.rows import (
    Finished,
    Row,
    as_numbers,
    base_of,
    gain,
    pick,
    rows_of,
    share,
    tokens,
    verdict,
)
from benchmarks.shares import gain_interval
from freemoe.evals.statistics import over_seeds

RIVAL = "lora-r1"


def tables_of(finished: Finished) -> dict[str, Any]:
    """Every table that the finished cells allow."""
    found: dict[str, Any] = {}
    for family in ("text", "task", "count", "home"):
        rows = rows_of(finished, family)
        if rows:
            found[family] = table(rows)
    extra = {"forgetting": forgetting(finished), "null": null_table(finished)}
    for name, made in extra.items():
        if made:
            found[name] = made
    return found


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per row that has a base, the base first."""
    found = []
    for row in rows:
        base = base_of(row, rows)
        if base is None:
            continue
        cell = row.cell
        setting = {"base": cell.base, "reference_documents": cell.documents}
        entry: dict[str, Any] = {"material": cell.material, "method": cell.treatment}
        entry |= {k: v for k, v in setting.items() if v} | {"reference": MATERIALS[cell.material].about}
        if row.text:
            entry["perplexity"] = round(math.exp(-row.values().sum() / tokens(row)), 4)
        else:
            entry |= {"accuracy": round(100 * float(row.values().mean()), 2), "items": len(row.keys)}
        if row is not base:
            entry |= _against(row, base, rows)
        found.append(entry | _cost(row))
    return found


def _against(row: Row, base: Row, rows: Sequence[Row]) -> dict[str, Any]:
    entry: dict[str, Any] = {"gain": as_numbers(gain(row, base)), "unit": "nats per token" if row.text else "points"}
    rivals = [r for r in rows if r.cell.treatment == RIVAL and base_of(r, rows) is base]
    if rivals and rivals[0] is not row:
        entry["share_of_lora_r1"] = as_numbers(share(row, rivals[0], base))
    tested = verdict(row, base)
    if tested is not None:
        entry["guard"] = {"gain": round(tested.gain, 5), "p": round(tested.p, 5), "documents": tested.tested}
    if len(row.records) > 1:
        each = [gain(replace(row, records=(r,)), base).mean for r in row.records]
        entry["over_seeds"] = {"seeds": [round(g, 4) for g in each], "interval": as_numbers(over_seeds(each))}
    return entry


def _cost(row: Row) -> dict[str, Any]:
    first = row.first
    speed, names = first["speed"], ("prefill", "decode")
    speeds = {f"{k}_tokens_per_second": round(speed[k], 2) for k in names if speed}
    # Of a model that was cut also against the whole one, measured in turns with it.
    speeds |= {f"{k}_against_dense": round(speed[k] / speed["dense"][k], 3) for k in names if "dense" in speed}
    cost: dict[str, Any] = {
        "share_off": row.mean("share_off"),
        "numbers": row.mean("numbers"),
        "bytes": row.mean("bytes"),
        "seconds": round(row.mean("seconds") or 0.0, 1),
        "memory_mb": round((row.mean("memory_bytes") or 0.0) / 1e6),
        "tokens_trained": row.mean("tokens_trained"),
        **speeds,
        "units": first.get("units"),
        "stopping_losses": [round(v, 4) for v in first["losses"]],
        "formats": first.get("formats"),
    }
    if first["cell"]["rate"]:
        cost |= {"rate": [r["cell"]["rate"] for r in row.records], "rates_tried": row.rates}
    return {k: v for k, v in cost.items() if v not in (0, 0.0, None, [])}


# -------------------------------------------------------------------------------------- forgetting


def forgetting(finished: Finished) -> list[dict[str, Any]]:
    """Rows: experts and unions of two; columns: materials. The expert's own column is its gain, the others its harm.

    Gains are in nats per token (text) or points (questions), with their 95 % intervals; ``routed`` is 0 by definition
    wherever the router keeps the expert out of another domain.
    """
    found = []
    own = {f: rows_of(finished, f) for f in ("text", "task")}
    on_base: dict[str, Any] = {}
    for record in finished.values():
        if record["cell"]["family"] == "cross" and record["cell"]["method"] == BASE:
            on_base = record["columns"]
    for record in finished.values():
        cell = Cell.read(record["cell"])
        if cell.family not in ("cross", "union") or cell.method == BASE:
            continue
        columns: dict[str, list[float | None]] = {}
        if cell.family == "cross":
            rows = own[MATERIALS[cell.material].kind]
            mine, base = (pick(rows, cell.material, t) for t in (cell.treatment, BASE))
            if mine is not None and base is not None:
                columns[cell.material] = as_numbers(gain(mine, base))
        for name, scored in record["columns"].items():
            difference = _elsewhere(name, scored, on_base.get(name), own)
            if difference is not None:
                columns[name] = difference
        label = "+".join(filter(None, (cell.material, cell.other)))
        found.append({"expert": label, "method": cell.treatment, "kind": cell.family, "gains": columns})
    return found


def _elsewhere(
    name: str, scored: dict[str, Any], known: dict[str, Any] | None, own: dict[str, list[Row]]
) -> list[float | None] | None:
    """Gain on a column's documents over the base on the same documents; None where the base was not measured on them.

    The base is known from its own ``cross`` cell, or from ``own``, the rows of texts and tasks: on all reported documents.
    """
    sign, entry = (-1.0, "nll") if scored["kind"] == "text" else (1.0, "right")
    row = pick(own[scored["kind"]], name, BASE)
    sources = [row.first if row is not None else None, known]
    before = {i: v for r in sources if r is not None for i, v in zip(r["ids"], r[entry], strict=True)}
    if any(i not in before for i in scored["ids"]):
        return None
    differences = [sign * (v - before[i]) for i, v in zip(scored["ids"], scored[entry], strict=True)]
    return as_numbers(gain_interval(differences, scored["keys"], scored.get("tokens")))


# -------------------------------------------------------------------------------------------- null


def null_table(finished: Finished) -> dict[str, Any]:
    """How many builds on permuted answers accepted anything, over all of them and by the number of documents."""
    batches = [r for r in finished.values() if r["cell"]["family"] == "null"]
    if not batches:
        return {}
    counts: dict[int, list[bool]] = {}
    for batch in batches:
        counts.setdefault(batch["reference"], []).extend(b["accepted"] for b in batch["builds"])
    builds = [b for r in batches for b in r["builds"]]
    return {
        "builds": len(builds),
        "accepted": sum(b["accepted"] for b in builds),
        "by_reference_documents": {str(n): [sum(taken), len(taken)] for n, taken in sorted(counts.items())},
        "smallest_p": sorted(round(b["p"], 4) for b in builds)[:5],
        "what": batches[0]["what"],
    }


# -------------------------------------------------------------------------------------------- page

_UNROUTED = (
    "Gain over the base with the expert left on everywhere. A router that keeps an expert inside its own domain makes every "
    "other column 0."
)


def markdown(details: dict[str, Any]) -> str:
    """One table per family, one row per material and method."""
    parts = [f"Base: {details['model']}; {details['cells']['done']} of {details['cells']['planned']} cells."]
    for family, title in (("text", "Text"), ("task", "Questions"), ("count", "Number of documents"), ("home", "Bases")):
        if details.get(family):
            parts += [f"## {title}", _shown(details[family])]
    if details.get("forgetting"):
        parts += ["## On the other materials", _UNROUTED, _columns(details["forgetting"])]
    return "\n\n".join(parts) + "\n"


def _shown(entries: Sequence[dict[str, Any]]) -> str:
    head = ["material", "method", "figure", "gain [95 %]", "of LoRA r=1", "guard p", "off", "ships", "s", "MB"]
    rows = []
    for e in entries:
        digits = 3 if "perplexity" in e else 1
        where = "/".join(str(e[k]) for k in ("base", "material", "reference_documents") if k in e)
        speeds = "prefill_tokens_per_second" in e
        rows.append(
            [
                where,
                e["method"] + (f", lr {e['rate'][0]:g}" if "rate" in e else ""),
                f"{e['perplexity']:.2f}" if "perplexity" in e else f"{e['accuracy']:.1f} %",
                interval(e.get("gain"), digits),
                interval([v if v is None else 100 * v for v in e.get("share_of_lora_r1") or []], 0, " %", False),
                f"{e['guard']['p']:.3f}" if "guard" in e else "",
                f"{e['share_off']:.2%}" if "share_off" in e else "",
                size(e.get("bytes"), 1),
                f"{e.get('seconds', 0):.0f}",
                str(e.get("memory_mb", "")),
                f"{e['prefill_tokens_per_second']:.0f}, {e['decode_tokens_per_second']:.1f}" if speeds else "-",
            ]
        )
    return grid([*head, "prefill, decode tokens/s"], rows)


def _columns(entries: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for e in entries for name in e["gains"]))
    rows = [[f"{e['expert']}, {e['method']}", *(interval(e["gains"].get(c), 2) for c in columns)] for e in entries]
    return grid(["expert", *columns], rows)
