"""`python -m benchmarks real --papers`: each paper's own method on a real LLM, beside ours and beside the dense model."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.harness import Figure, Outcome, Settings
from benchmarks.pages import grid, interval
from benchmarks.real_llm.cells import BASE, Cell
from benchmarks.real_llm.data import MATERIALS
from benchmarks.real_llm.figures.mixtures import perplexity
from benchmarks.real_llm.figures.rows import Finished, as_numbers
from benchmarks.real_llm.methods.mixtures import EXPERTS
from benchmarks.real_llm.methods.papers import BANDS, LENGTH, STEP_TOKENS, TEST_BLOCKS, WIDTH
from benchmarks.real_llm.plan import MAIN_BUDGET, estimates
from benchmarks.real_llm.protocol import Protocol
from benchmarks.real_llm.running import Bench, bench_of, listed
from benchmarks.rivals.rival import Schedule
from benchmarks.shares import gain_interval
from freemoe.core.files import write_atomic

MATERIALS_SHOWN = ("wikitext", "arc-easy", "mmlu", "gsm8k", "arc-challenge")
SHARES, STEPS, ROUTER_STEPS = (0.5, 0.7), (60, 240, 960), 12
TERMS = Protocol(reference=24, blocks=32, questions=100, schedule=Schedule(24, 1024, every=8, patience=3))
"""Small enough for two hours of one core; ours trains on the same reference documents."""


def cells() -> list[Cell]:
    """Every cell in order: first one of each method, then more of the same."""
    text, most, rest = MATERIALS_SHOWN[0], MATERIALS_SHOWN[:3], MATERIALS_SHOWN[3:]
    split = Cell("mixture", text, "split", documents=ROUTER_STEPS)

    def gates(method: str, steps: int, *shares: float) -> list[Cell]:
        return [Cell("gates", text, method, share, documents=steps) for share in shares]

    def bands(names: Sequence[str], *methods: str) -> list[Cell]:
        return [Cell("bands", name, method) for method in methods for name in names]

    first, others = SHARES[:1], SHARES[1:]
    found = [*bands(most, BASE, BANDS[0]), Cell("gates", text, "dense"), *gates("paper", 60, *first)]
    found += [*gates("ours", 60, *first), split, replace(split, family="trim", method="paper")]
    found += [*bands(most, *BANDS[1:]), *gates("paper", 60, *others), *gates("ours", 60, *others)]
    for name in MATERIALS_SHOWN:
        found += [Cell(MATERIALS[name].kind, name), Cell(MATERIALS[name].kind, name, "learned", MAIN_BUDGET)]
    found += [*bands(rest, BASE, *BANDS), replace(split, family="trim", method="hooks")]
    return [*found, *(c for n in STEPS[1:] for m in ("paper", "ours") for c in gates(m, n, *SHARES))]


def _bench(settings: Settings) -> Bench:
    return bench_of(settings, "papers", cells(), TERMS)


def listing(settings: Settings) -> list[dict[str, Any]]:
    """Every cell in order: its name, whether it is done, and the seconds that it took, or about will."""
    bench = _bench(settings)
    return listed(bench, estimates(bench.wanted, bench.protocol, bench.finished), settings.only)


def run(settings: Settings) -> Outcome:
    """Run what is missing, then make the tables of all that is there."""
    bench = _bench(settings)
    bench.run_missing(settings.only, settings.minutes, settings.progress, settings.place)
    tables = {name: [made(bench.finished, cell) for cell in _rows(name)] for name, made in _TABLES.items()}
    details = {
        "model": Path(bench.model).name,
        "cells": {"done": len(bench.finished), "planned": len(bench.wanted)},
        "failed": bench.failed,
        "protocol": asdict(bench.protocol),
        "tables": tables,
    }
    figures = [
        Figure(f"{name}: {', '.join(row['name'])}", row["gain"][0], unit=f" {row['unit']}", digits=3, note=row["note"])
        for name, rows in tables.items()
        for row in rows
        if row.get("gain") and row["gain"][0] is not None
    ]
    return Outcome(tuple(figures), details)


# ------------------------------------------------------------------------------------------ tables


def _rows(family: str) -> list[Cell]:
    """The cells that a table has as rows, in its own order."""
    order = {name: number for number, name in enumerate(MATERIALS_SHOWN)}
    found = [c for c in cells() if c.family == family or (family == "bands" and c.method == "learned")]
    if family == "bands":
        found += [Cell("bands", name, ANY) for name in MATERIALS_SHOWN]
    return sorted(found, key=lambda c: (order[c.material], c.method != BASE, c.budget, c.documents))


def _shown(row: dict[str, Any], against: dict[str, Any]) -> list[float | None]:
    """Paired gain over the base or the dense model: nats per token, or points."""
    if "right" in row and "nll" not in row:
        return as_numbers(gain_interval(np.subtract(row["right"], against["right"]), against["keys"]), 2)
    keys = against.get("keys") or [str(i) for i in range(len(row["nll"]))]
    return as_numbers(gain_interval(np.subtract(against["nll"], row["nll"]), keys, against["tokens"]))


def _figure(row: dict[str, Any]) -> str:
    return f"{perplexity(row):.2f}" if "nll" in row else f"{100 * float(np.mean(row['right'])):.1f} %"


def _of_bands(finished: Finished, cell: Cell) -> dict[str, Any]:
    """A ranking's best band by the reference documents, and by the reported ones; of `ANY` the best of all rankings."""
    base, own = finished.get(replace(cell, family="bands", method=BASE, budget=0.0).name), finished.get(cell.name)
    name, unit = _METHODS.get(cell.method, cell.method), _UNITS[MATERIALS[cell.material].kind]
    known = [r for m in BANDS if (r := finished.get(replace(cell, method=m).name)) is not None]
    if cell.method == ANY and len(known) > 1:
        name += f", the best of {len(known)} rankings"
        by = {
            side: max(known, key=lambda r, side=side, n=n: r["bands"][r[side]["band"]][n])
            for n, side in enumerate(_SIDES)
        }
        own = {side: r[side] for side, r in by.items()}
    found: dict[str, Any] = {"name": [cell.material, name], "unit": unit}
    if base is None or own is None:
        return found
    chosen = own.get("chosen", own)
    found["figure"] = _figure(chosen)
    if cell.method == BASE:
        return found
    found |= {"gain": _shown(chosen, base), "note": chosen.get("band", "1 % of the weights off")}
    if "oracle" in own:
        found |= {"oracle": _shown(own["oracle"], base), "oracle_note": own["oracle"]["band"]}
    return found


def _of_gates(finished: Finished, cell: Cell) -> dict[str, Any]:
    """Perplexity at a number of steps, and what it is beside the dense model and beside ours of the same steps."""
    own, dense = finished.get(cell.name), finished.get(Cell("gates", cell.material, "dense").name)
    ours = finished.get(replace(cell, method="ours").name) if cell.method == "paper" else None
    share = f"{cell.budget:.0%}" if cell.budget else ""
    found = {"name": [_METHODS[cell.method], share, str(cell.documents or "")], "unit": "nats per token"}
    if own is None or dense is None:
        return found
    found["figure"] = _figure(own)
    if cell.budget:
        found |= {"gain": _shown(own, dense), "note": f"{own['share']:.1%} of the weights"}
    return {**found, "oracle": _shown(own, ours)} if ours else found


def _of_trims(finished: Finished, cell: Cell) -> dict[str, Any]:
    """Perplexity of the mixture, of the plan alone and with hooks, and the share of the lost loss that these win back."""
    own = finished.get(cell.name)
    found = {"name": [_METHODS[cell.method]], "unit": "% of the lost loss"}
    if own is None:
        return found
    levels = [f"{math.exp(own['rows'][n]['ce']):.2f}" for n in ("full", "plan", "hooks") if n in own["rows"]]
    won = [v if v is None else 100 * v for v in own["rows"].get("hooks", {}).get("recovered_ce", [])]
    ks, units = sorted(map(int, own["plan"]["text"].split(","))), own["hooks"].values()
    k = f"k {ks[0]} to {ks[-1]}" if ks[0] < ks[-1] else f"k {ks[0]} in every layer"
    hooks = f"{len(units)} hooks, {sum(units)} units in all" if len(units) > 1 else f"one hook of {sum(units)} units"
    note = f"Act {own['plan']['act']:g}, {k}; {hooks}, {own['training']['steps']} steps"
    return {**found, "figure": " / ".join(levels), "gain": won, "note": note}


ANY, _SIDES = "any", ("chosen", "oracle")
_SIZES = {
    "router_steps": ROUTER_STEPS, "experts": EXPERTS, "gate_tokens": STEP_TOKENS, "length": LENGTH, "test_blocks": TEST_BLOCKS,
    "width": WIDTH,
}  # fmt: skip
_UNITS = {"text": "nats per token", "task": "points"}
_METHODS = {
    BASE: "dense model", "dense": "dense model", "learned": "ours: learned switches", ANY: "MoDE", "paper": "the paper's", "ours": "ours",
    "hooks": "ours", **{name: f"MoDE, p = {name[1:].replace('-', ', patches ')}" for name in BANDS},
}  # fmt: skip
_TABLES = {"bands": _of_bands, "gates": _of_gates, "trim": _of_trims}


def markdown(details: dict[str, Any]) -> str:
    """The page: a table per system, every measured cell a row."""
    protocol = details["protocol"]
    common = (
        f"Base: {details['model']}; {details['cells']['done']} of {details['cells']['planned']} cells, products in "
        f"{protocol['score']}. One seed; other work took part of the machine, so that no seconds are told. Differences are paired, with "
        "95 % intervals; above zero is better than the dense model."
    )
    parts = ["# The papers' own methods on a real LLM", textwrap.fill(common, 120)]
    terms = protocol["schedule"] | protocol | _SIZES
    for name, section in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
        head = section["head"].split(" | ")
        rows, planned = [], details["tables"][name]
        for row in (row for row in planned if "figure" in row):
            digits = {"nats per token": 3, "points": 1}.get(row["unit"], 0)
            beside = [interval(row.get("oracle"), digits), row.get("oracle_note", "")]
            told = [row["figure"], interval(row.get("gain"), digits), row.get("note", ""), *beside]
            rows.append([*row["name"], *told][: len(head)])
        parts += [f"## {section['title']}", textwrap.fill(section["about"].format(**terms), 120), grid(head, rows)]
        if len(rows) < len(planned):
            parts.append(f"{len(planned) - len(rows)} more rows are planned and not measured yet.")
    return "\n\n".join(parts) + "\n"


def draw(details: dict[str, Any], folder: Path) -> None:
    """Write ``papers.md``."""
    write_atomic(folder / "papers.md", markdown(details).encode())
