"""The figures with targets: T13 (text), T14 (questions), those of whole neurons and of mixtures, and T17 (null test).

What is missing is `not measured`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import beta

from benchmarks.harness import Figure, not_measured
from benchmarks.real_llm.cells import BASE, Cell
from benchmarks.real_llm.data import TASKS
from benchmarks.real_llm.figures.mixtures import mixture_figures
from benchmarks.real_llm.figures.rows import Finished, Row, accepted, gain, gains, pick, rows_of, share
from benchmarks.real_llm.figures.structured import structured_figures
from benchmarks.real_llm.figures.tables import RIVAL, null_table
from benchmarks.shares import share_bootstrap, shown
from freemoe.evals.statistics import mean_of_means

SWITCHES = ("learned", "greedy")
_MOST, _LITTLE = 0.05, 0.01
_T13_TEXTS = ("wikitext", "gsm8k")


def figures_of(finished: Finished) -> list[Figure]:
    """Every figure, measured or not."""
    texts, tasks = rows_of(finished, "text"), rows_of(finished, "task")
    found = [figure for text in _T13_TEXTS for figure in text_figures(texts, text)]
    return [
        *found,
        *task_figures(tasks),
        *routed_figures(finished),
        *structured_figures(finished),
        *mixture_figures(finished),
        null_figure(finished),
    ]


# --------------------------------------------------------------------------------------------- T13


def best_switches(rows: Sequence[Row], material: str, most: float) -> Row | None:
    """Among switches of at most so much off, those with the best stopping loss; None where there are none."""
    return min(switches_of(rows, material, most), key=lambda r: r.stopping, default=None)


def switches_of(rows: Sequence[Row], material: str, most: float) -> list[Row]:
    """Every row of switches on a material with at most so much off."""
    mine = [r for r in rows if r.cell.material == material and not r.cell.base and r.cell.method in SWITCHES]
    return [r for r in mine if r.cell.budget <= most]


def text_figures(rows: Sequence[Row], material: str) -> list[Figure]:
    """T13 of one text: share of LoRA r = 1's gain at <= 5 % off, and the lower end of the gain at <= 1 % off."""
    names = (
        f"T13 {material}: share of LoRA r=1's gain, switches, <= 5 % off",
        f"T13 {material}: lower end of the 95 % interval of the gain, <= 1 % off, nats per token",
    )
    base, lora = pick(rows, material, BASE), pick(rows, material, RIVAL)
    if base is None:
        return [
            not_measured(n, t, u, "no cell of it is done")
            for n, t, u in zip(names, (90.0, 0.0), (" %", ""), strict=True)
        ]
    little = best_switches(rows, material, _LITTLE)
    if little is None:
        low = not_measured(names[1], 0.0, "", "cells of switches at <= 1 % are missing")
    else:
        won = gain(little, base)
        note = f"{little.cell.treatment} {shown(won, 3)}, {little.mean('share_off') or 0:.2%} off, {_seeds(little)}"
        low = Figure(names[1], _above(won.low), 0.0, unit="", digits=4, note=note)
    return [_share_figure(names[0], rows, base, lora), low]


def _share_figure(name: str, rows: Sequence[Row], base: Row, lora: Row | None) -> Figure:
    row = best_switches(rows, base.cell.material, _MOST)
    if row is None or lora is None:
        return not_measured(
            name, 90.0, " %", "cells of " + ("switches" if row is None else "LoRA r=1") + " are missing"
        )
    part, mine, rival = share(row, lora, base).scaled(100), gain(row, base), gain(lora, base)
    if not math.isfinite(part.mean):
        return not_measured(
            name, 90.0, " %", f"LoRA r=1 gains nothing here ({shown(rival, 3)}); switches {shown(mine, 3)}"
        )
    note = (
        f"95 % [{part.low:.1f}, {part.high:.1f}]; {row.cell.treatment} {shown(mine, 3)} of LoRA's {shown(rival, 3)} nats "
        f"per token, {row.mean('share_off') or 0:.2%} off, {_seeds(row)}; best by stopping loss of "
        f"{len(switches_of(rows, base.cell.material, _MOST))} settings, LoRA of {lora.rates} rates"
    )
    return Figure(name, part.mean, 90.0, unit=" %", digits=1, note=note)


def _above(value: float) -> float:
    """A gain of exactly zero is no gain: it stands just below a target of zero."""
    return value if value != 0 else -1e-9


def _seeds(row: Row) -> str:
    return "1 seed" if len(row.records) == 1 else f"mean of {len(row.records)} seeds"


# --------------------------------------------------------------------------------------------- T14


def task_figures(rows: Sequence[Row]) -> list[Figure]:
    """T14: macro average over the eight tasks, guarded experts by the known domain; shares of LoRA r = 1 with and without a guard."""
    name = "T14 eight tasks: lower end of the 95 % interval of the macro-average gain, guarded"
    shares = (
        ("T14 eight tasks: share of LoRA r=1's macro-average gain", 90.0),
        # A guard turns down gains that it cannot prove: here like is compared with like.
        ("T14 the same, LoRA r=1 behind the same guard", None),
        ("T14 the same, both without a guard", None),
    )
    chosen: list[tuple[Row, Row]] = []
    rivals: list[Row | None] = []
    missing, without = [], []
    for task in (t.name for t in TASKS):
        base, row = pick(rows, task, BASE), best_switches(rows, task, _MOST)
        if base is None:
            missing.append(task)
            continue
        if row is None:
            without.append(task)
        # A task that has no expert is the base's.
        chosen.append((row or base, base))
        rivals.append(pick(rows, task, RIVAL) if row is not None else None)
    if missing or len(without) == len(chosen):
        note = f"cells of {', '.join(missing or without)} are missing"
        return [not_measured(name, 0.0, " points", note), *(not_measured(n, t, " %", note) for n, t in shares)]
    passed = accepted(chosen)
    mine = [(gains(row, base) * ok, gains(row, base), row.keys) for (row, base), ok in zip(chosen, passed, strict=True)]
    guarded = mean_of_means([(g.tolist(), keys) for g, _, keys in mine]).scaled(100)
    plain = mean_of_means([(g.tolist(), keys) for _, g, keys in mine]).scaled(100)
    took = ", ".join(row.cell.material for (row, _), ok in zip(chosen, passed, strict=True) if ok) or "none"
    note = (
        f"guarded {shown(guarded)}, unguarded {shown(plain)}; accepted: {took}; "
        + (f"no expert yet, so the base: {', '.join(without)}; " if without else "")
        + "every question under its own task's expert; the router has a figure of its own"
    )
    first = Figure(name, _above(guarded.low), 0.0, unit=" points", note=note)
    if not any(rivals):
        return [first, *(not_measured(n, t, " %", "cells of LoRA r=1 are missing") for n, t in shares)]
    absent = [base.cell.material for r, (_, base) in zip(rivals, chosen, strict=True) if r is None]
    met = [(one, rival) for one, rival in zip(chosen, rivals, strict=True) if rival is not None]
    trusted = accepted([(rival, base) for (_, base), rival in met])
    taken = [ok for ok, rival in zip(passed, rivals, strict=True) if rival is not None]
    everything = [True] * len(met)
    sides = ((taken, everything), (taken, trusted), (everything, everything))
    told = [_share_of_rival(n, t, met, side, absent) for (n, t), side in zip(shares, sides, strict=True)]
    return [first, *told]


def _share_of_rival(
    name: str,
    target: float | None,
    met: Sequence[tuple[tuple[Row, Row], Row]],
    count: tuple[Sequence[bool], Sequence[bool]],
    absent: Sequence[str],
) -> Figure:
    """Share of LoRA's macro-average gain; ``absent``: tasks on which one of the two is missing.

    ``met``: per task the switches' row and the base's, and LoRA's; ``count``: on which of them switches count, and on which LoRA
    does. On the others the base answers.
    """
    pairs = [
        ((gains(row, base) * a).tolist(), (gains(rival, base) * b).tolist(), row.keys)
        for ((row, base), rival), a, b in zip(met, *count, strict=True)
    ]
    lora = mean_of_means([(their, keys) for _, their, keys in pairs]).scaled(100)
    part = share_bootstrap(pairs).scaled(100)
    whole = f"LoRA r=1's {shown(lora)} points"
    if absent:
        note = (
            f"cells of LoRA r=1 or of switches are missing on {', '.join(absent)}; on the others {part.mean:.1f} % "
            f"[{part.low:.0f}, {part.high:.0f}] of {whole}"
        )
        return not_measured(name, target, " %", note)
    if not math.isfinite(part.mean):
        return not_measured(name, target, " %", f"{whole} are no gain on average")
    note = f"95 % [{part.low:.0f}, {part.high:.0f}] of {whole}"
    return Figure(name, part.mean, target, unit=" %", digits=1, note=note)


def routed_figures(finished: Finished) -> list[Figure]:
    """T14 with a router: each question under the expert of the task that the router picks, where that one was accepted.

    Once as it is, and once as if the router never left a question to the base.
    """
    names = (
        "T14 eight tasks, routed: lower end of the 95 % interval of the macro-average gain, guarded",
        "T14 the same, the router never abstains",
    )

    def lost(note: str) -> list[Figure]:
        return [not_measured(names[0], 0.0, " points", note), not_measured(names[1], None, " points", note)]

    record = next((r for r in finished.values() if r["cell"]["family"] == "route"), None)
    if record is None:
        return lost("its cell is not done")
    rows, treatment = rows_of(finished, "task"), Cell.read(record["cell"]).treatment
    bases = {task: pick(rows, task, BASE) for task in record["tasks"]}
    pairs = {}
    for task, base in bases.items():
        row = pick(rows, task, treatment) if task in record["experts"] else base
        if row is None or base is None:
            return lost(f"cells of {task} are missing")
        if record["tasks"][task]["ids"] != row.first["ids"]:
            return lost(f"the cells of {task} were reported on other questions than were routed")
        pairs[task] = (row, base)
    passed = dict(zip(pairs, accepted(list(pairs.values())), strict=True))
    without = ", ".join(t for t in bases if t not in record["experts"])
    said = f"accepted: {', '.join(t for t, ok in passed.items() if ok) or 'none'}; "
    said += f"no expert yet, so the base: {without}; " if without else ""
    found = []
    for name, target, ever in zip(names, (0.0, None), (True, False), strict=True):
        parts, astray, abstained = [], [], []
        for task, routes in record["tasks"].items():
            row, base = pairs[task]
            left = [ever and abstains for abstains in routes["abstains"]]
            parts.append(([float(g) for g in _routed_gains(row, base, task, routes, left, passed)], row.keys))
            astray.append(np.mean([p != task and not stays for p, stays in zip(routes["picked"], left, strict=True)]))
            abstained.append(np.mean(left))
        mean = mean_of_means(parts).scaled(100)
        note = f"{treatment} {shown(mean)}; {said}{np.mean(astray):.1%} went to another task's expert"
        note += f", {np.mean(abstained):.1%} to the base" if ever else ""
        found.append(Figure(name, _above(mean.low), target, unit=" points", note=note))
    return found


def _routed_gains(
    row: Row, base: Row, task: str, routes: dict[str, Any], left: Sequence[bool], passed: dict[str, bool]
) -> np.ndarray:
    """Per reported question of a task what routing changed; ``left`` to the base or ``passed`` by the guard say who answers."""
    own, before = row.values(), base.values()
    answers = [
        before[i] if stays or not passed[picked] else own[i] if picked == task else routes["right"][i]
        for i, (picked, stays) in enumerate(zip(routes["picked"], left, strict=True))
    ]
    return np.array(answers, dtype=float) - before


# --------------------------------------------------------------------------------------------- T17


def null_figure(finished: Finished) -> Figure:
    """T17: share of builds on permuted answers that accepted an expert."""
    name = "T17 null test: builds on permuted answers that accepted an expert"
    found = null_table(finished)
    if not found:
        return not_measured(name, 5.0, " %", "no cell of it is done", "lower")
    taken, builds = found["accepted"], found["builds"]
    # Clopper and Pearson's interval of a share.
    low = float(beta.ppf(0.025, taken, builds - taken + 1)) if taken else 0.0
    high = float(beta.ppf(0.975, taken + 1, builds - taken)) if taken < builds else 1.0
    note = f"{taken} of {builds} builds, 95 % [{100 * low:.1f}, {100 * high:.1f}]; {found['what']}"
    return Figure(name, 100 * taken / builds, 5.0, "lower", " %", 1, note)
