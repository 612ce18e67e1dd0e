"""Which cells there are, in the order in which they answer the most, and about how long each takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.real_llm.cells import ALL, BASE, EVERYTHING, Cell
from benchmarks.real_llm.data import MATERIALS, TASKS, TEXTS
from benchmarks.real_llm.methods.structured import SETTINGS, TARGET, begins_with, passes, tiny_cells
from benchmarks.real_llm.protocol import Protocol

RATES = (2e-3, 5e-3, 8e-4)
BUDGETS = (0.003, 0.01, 0.03, 0.05)
MAIN_BUDGET, LARGE_BUDGET = 0.01, 0.05
COUNTS = (100, 300, 1000, 3000)
SEEDS = (1, 2)
HOMES = ("models/stories260k",)
UNIONS = (("wikitext", "gsm8k"), ("c4", "code"))
NULL_BATCHES, NULL_COUNTS = 10, (300, 1000)
CURVES = ("wikitext", "gsm8k")
CONVERTED = (0.7, 0.5)

_TEXT_TOKENS, _QUESTION_TOKENS = 256, 150
# A backward pass costs about two forward passes.
_BACKWARD = 3
# Tokens per second of 135 million weights on two cores.
_SPEEDS = {"float32": 700.0, "bfloat16": 1800.0}
# How many times faster a tiny base is.
_TINY = 20
# Families whose cells do not read documents in the same way as the others: about how long one takes.
_SECONDS = {"null": 200.0, "convert": 2400.0, "mixture": 1500.0, "trim": 2400.0, "gates": 600.0}


def cells(quick: bool = False) -> list[Cell]:
    """Every cell in order; the first hour answers T13 on WikiText-2."""
    found: list[Cell] = []
    for text in CURVES:
        found += _first(Cell("text", text))
        # The first text answers what the next ones are measured for; what follows it takes minutes.
        if text == CURVES[0]:
            found += tiny_cells(HOMES[0])
            found += [Cell("text", text, "structured", TARGET)]
    found += [Cell("null", f"batch{n}", base=HOMES[0]) for n in range(1 if quick else NULL_BATCHES)]
    for task in TASKS:
        cell = Cell("task", task.name)
        found += [cell, *_off(cell, "learned", MAIN_BUDGET), *_lora(cell, 1), *_off(cell, "greedy", MAIN_BUDGET)]
    found += [Cell("route", ALL, "learned", MAIN_BUDGET)]
    for text in TEXTS:
        cell = Cell("text", text.name)
        found += [replace(cell, method=m, **more) for m, settings in SETTINGS.items() for more in settings]
    found += [Cell("convert", CURVES[0], "tomoe", share) for share in CONVERTED]
    found += [Cell("mixture", CURVES[0], "split"), Cell("trim", CURVES[0], "hooks")]
    for text in TEXTS[len(CURVES) :]:
        found += _first(Cell("text", text.name))
    for text in TEXTS:
        found += _further(Cell("text", text.name))
    found += [Cell("cross", EVERYTHING)]
    found += [Cell("cross", material.name, "learned", MAIN_BUDGET) for material in (*TEXTS, *TASKS)]
    found += [Cell("cross", material.name, "lora", rank=1) for material in TEXTS]
    found += [Cell("union", a, "learned", MAIN_BUDGET, other=b) for a, b in UNIONS]
    for text in CURVES:
        for number in COUNTS:
            cell = Cell("count", text, documents=number)
            found += [cell, *_off(cell, "learned", MAIN_BUDGET), *_lora(cell, 1, RATES[:1])]
    found += [Cell("null", "batch0", base=HOMES[0], documents=n) for n in NULL_COUNTS]
    for home in HOMES:
        for text in ("tinystories", *(t.name for t in TEXTS)):
            cell = Cell("home", text, base=home)
            found += [cell, *_off(cell, "learned", MAIN_BUDGET), *_lora(cell, 1, RATES[:2])]
    main = [c for c in found if c.family in ("text", "task") and c.material in (*CURVES, *(t.name for t in TASKS))]
    repeated = [("learned", MAIN_BUDGET, 0), ("learned", LARGE_BUDGET, 0), ("lora", 0.0, 1)]
    again = [c for c in main if (c.method, c.budget, c.rank) in repeated]
    found += [replace(c, seed=seed) for seed in SEEDS for c in again]
    return list(dict.fromkeys(found))


def _lora(cell: Cell, rank: int, rates: Iterable[float] = RATES) -> list[Cell]:
    return [replace(cell, method="lora", rank=rank, rate=rate) for rate in rates]


def _off(cell: Cell, method: str, *budgets: float) -> list[Cell]:
    return [replace(cell, method=method, budget=b) for b in budgets]


def _first(cell: Cell) -> list[Cell]:
    return [
        cell,
        *_lora(cell, 1),
        *_off(cell, "learned", LARGE_BUDGET, MAIN_BUDGET),
        *_off(cell, "greedy", MAIN_BUDGET, LARGE_BUDGET),
    ]


def _further(cell: Cell) -> list[Cell]:
    rest = [b for b in BUDGETS if b not in (MAIN_BUDGET, LARGE_BUDGET)]
    return [
        *_off(cell, "learned", *rest),
        *_lora(cell, 4),
        *_lora(cell, 16),
    ]


def needs(cell: Cell, finished: dict[str, dict[str, Any]], everything: Sequence[Cell]) -> list[Cell] | None:
    """The cells whose experts a ``cross``, ``union`` or ``route`` cell tries out, or one begins with; None while one is missing.

    What is trimmed was split by a cell of its own.

    A router goes without the experts that are missing: their questions are the base's. Where an expert's learning rate is one
    of several, all of them must be there, and the best stopping loss decides.
    """
    if cell.family == "text" and (below := begins_with(cell)) is not None:
        return [below] if below.name in finished else None
    if cell.family == "gates":
        shorter = [c for c in everything if replace(c, documents=0) == replace(cell, documents=0)]
        below = shorter[: shorter.index(cell)][-1:] if cell.method == "paper" else []
        return below if all(c.name in finished for c in below) else None
    if cell.family == "trim":
        split = replace(cell, family="mixture", method="split")
        return [split] if split.name in finished else None
    if cell.family not in ("cross", "union", "route") or cell.method == BASE:
        return []
    chosen = []
    names = [t.name for t in TASKS] if cell.family == "route" else filter(None, (cell.material, cell.other))
    for material in names:
        family = MATERIALS[material].kind
        same = [
            c
            for c in everything
            if c.family == family and c.material == material and c.treatment == cell.treatment and c.seed == cell.seed
        ]
        if not same or any(c.name not in finished for c in same):
            if cell.family == "route":
                continue
            return None
        chosen.append(min(same, key=lambda c: min(finished[c.name]["losses"], default=math.inf)))
    return chosen or None


# -------------------------------------------------------------------------------------------- time


def work(cell: Cell, protocol: Protocol) -> float:
    """About how many tokens' forward passes a cell takes."""
    if cell.family in _SECONDS:
        return 0.0
    if cell.family == "route":
        # Those that the router sends astray: a tenth, say.
        return len(TASKS) * 0.1 * protocol.questions * _QUESTION_TOKENS
    if cell.family in ("cross", "union"):
        return (len(MATERIALS) - 1) * protocol.crossed * (_TEXT_TOKENS + _QUESTION_TOKENS) / 2
    text = MATERIALS[cell.material].kind == "text"
    each = _TEXT_TOKENS if text else _QUESTION_TOKENS
    reference = cell.documents or protocol.reference
    reported = protocol.blocks if text else protocol.questions
    if cell.family == "bands":
        return (1 if cell.method == BASE else 6) * (reported + reference) * each
    scored = (reported + 0.35 * reference) * each
    stop = 0.25 * reference * each
    schedule = protocol.schedule
    looks = stop * (1 + schedule.steps / schedule.every)
    step = schedule.step_tokens if text else protocol.step_questions * each / 4
    trained = _BACKWARD * schedule.steps * step
    first = _BACKWARD * 0.4 * reference * each
    extra = {
        "base": 0.0,
        "greedy": looks + 6 * first,
        "learned": looks + trained + first,
    }
    neurons = passes(cell.method, stop, first, looks, trained)
    return scored + (extra.get(cell.method, looks + trained) if neurons is None else neurons)


def estimates(wanted: Sequence[Cell], protocol: Protocol, finished: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds that every cell may take, by its name: after what the finished ones of its kind took."""

    def kinds(cell: Cell) -> list[str]:
        close = f"{cell.base}|{cell.family}|{cell.method}"
        return [close] if cell.family in _SECONDS else [close, cell.base]

    def units(cell: Cell) -> float:
        return (
            max(1.0, cell.documents / (60 if cell.family == "gates" else 120))
            if cell.family in _SECONDS
            else work(cell, protocol)
        )

    def first(cell: Cell) -> float:
        return _SECONDS.get(cell.family, 1 / (_SPEEDS[protocol.train] * (_TINY if cell.base else 1)))

    return seconds_of(wanted, finished, units, kinds, first)


def seconds_of(
    wanted: Sequence[Cell],
    finished: dict[str, dict[str, Any]],
    units: Callable[[Cell], float],
    kinds: Callable[[Cell], Sequence[Any]],
    first: Callable[[Cell], float],
    start: float = 0.0,
) -> dict[str, float]:
    """Seconds that every cell may take, by its name: ``units`` of work, each as long as in finished cells of its ``kinds``.

    The closest of ``kinds`` comes first; ``first``: seconds of a unit while none of them is done; ``start``: seconds that a process
    takes before it does anything.
    """
    seen: dict[Any, list[float]] = {}
    for cell in wanted:
        if cell.name in finished:
            rate = (finished[cell.name]["wall_seconds"] - start) / units(cell)
            for kind in kinds(cell):
                seen.setdefault(kind, []).append(max(rate, 0.1 / units(cell)) if start else rate)
    found = {}
    for cell in wanted:
        known = next((sorted(seen[kind]) for kind in kinds(cell) if kind in seen), [first(cell)])
        found[cell.name] = start + units(cell) * known[len(known) // 2]
    return found
