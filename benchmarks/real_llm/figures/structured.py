"""The figures of whole neurons: T15 (what goes at no loss, and how fast it is), T15b (a tiny base) and T16 (rivals)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import Figure, not_measured
from benchmarks.real_llm.cells import BASE, Cell
from benchmarks.real_llm.data import TEXTS
from benchmarks.real_llm.figures.rows import Finished, Row, base_of, gain, pick, rows_of
from benchmarks.real_llm.methods.structured import FREE, RIVALS, SHARES, TARGET
from benchmarks.shares import shown

_MATERIALS = 2
# Neurons alone, and with single switches inside what they leave.
CUTS = ("structured", "structured-switches")
_PREFILL, _DECODE = 1.12, 1.10
_TINY = (("wikitext", FREE, TARGET, 0.28), ("gsm8k", "structured-switches", 0.25, 0.11))
_TINY_BASE = "stories260k"


def structured_figures(finished: Finished) -> list[Figure]:
    """T15, T15b and T16, measured or not."""
    rows = rows_of(finished, "text")
    return [*loss_figures(rows), *tiny_figures(rows_of(finished, "home")), *rival_figures(rows)]


def _share(row: Row) -> float:
    """Neurons off, as a share of all: what the budget became in whole neurons."""
    return float(row.first["units"]["share"])


def _treatment(method: str, budget: float) -> str:
    return Cell("", "", method, budget).treatment


# --------------------------------------------------------------------------------------------- T15


def _cuts(rows: Sequence[Row], material: str, methods: Sequence[str]) -> list[Row]:
    """Every row of neurons off on a material, by methods and budgets."""
    found = (pick(rows, material, _treatment(m, b)) for m in methods for b in SHARES)
    return [r for r in found if r is not None]


def at_no_loss(rows: Sequence[Row], material: str, methods: Sequence[str]) -> Row | None:
    """The largest share off whose interval of the gain does not lie below zero; None where every one's does."""
    base = pick(rows, material, BASE)
    good = [r for r in _cuts(rows, material, methods) if base is not None and gain(r, base).high >= 0]
    return max(good, key=_share, default=None)


def loss_figures(rows: Sequence[Row]) -> list[Figure]:
    """T15: the share that the second-best text loses at no held-out loss, and the speed of what is left."""
    first = f"T15 MLP neurons off at no held-out loss, on at least {_MATERIALS} texts"
    joint, reached = _loss_figure(first, rows, CUTS, 100 * TARGET)
    alone, _ = _loss_figure("T15 the same, no single switches beside the neurons", rows, CUTS[:1], None)
    told = [r for t in TEXTS if pick(rows, t.name, BASE) is not None for r in _cuts(rows, t.name, CUTS)]
    return [joint, alone, *_speeds(told, reached)]


def _loss_figure(name: str, rows: Sequence[Row], methods: Sequence[str], target: float | None) -> tuple[Figure, float]:
    """The figure of some methods, and the share itself; 0 where it is not measured or no share costs nothing."""
    shares, words = [], []
    for material in (t.name for t in TEXTS):
        base, tried = pick(rows, material, BASE), _cuts(rows, material, methods)
        if base is None or not tried:
            continue
        best = at_no_loss(rows, material, methods)
        shares.append(_share(best) if best is not None else 0.0)
        off = ((f"{_share(r):.1%}" + " and switches" * (r.cell.method != CUTS[0]), gain(r, base)) for r in tried)
        words.append(f"{material} " + ", ".join(f"{what} {shown(won, 3)}" for what, won in off))
    if len(shares) < _MATERIALS:
        note = "; ".join([f"cells of neurons off are done on {len(shares)} texts, {_MATERIALS} are needed", *words])
        return Figure(name, math.nan, target, unit=" %", note=note), 0.0
    reached = sorted(shares)[-_MATERIALS]
    note = f"gain in nats per token with 95 % interval: {'; '.join(words)}"
    return Figure(name, 100 * reached, target, unit=" %", digits=1, note=note), reached


def _speeds(rows: Sequence[Row], reached: float) -> list[Figure]:
    """Prefill and decode in the scoring format and in fp32, at the share reached at no loss, or at the target's where none is."""
    wanted = reached or TARGET
    nearest = min((abs(_share(r) - wanted) for r in rows), default=math.inf)
    # Shares of one budget differ by rounding only; others are another model's speed.
    same = [r for r in rows if abs(_share(r) - wanted) == nearest <= 0.02]
    whole = [r.first["speed"] for r in same if "dense" in r.first["speed"]]
    forms = (("", whole), (", fp32", [s["float32"] for s in whole if "float32" in s]))
    found = []
    for form, speeds in forms:
        for entry, words, target in (("prefill", "prefill 512", _PREFILL), ("decode", "decode", _DECODE)):
            name = f"T15 shrunk plain checkpoint, {words}, against the dense one in turns{form}"
            if not speeds:
                found.append(not_measured(name, target, "x", f"no cell of structured at {wanted:.0%} is done"))
                continue
            ratio = float(np.median([s[entry] / s["dense"][entry] for s in speeds]))
            sizes = whole[0]["parameters"]
            none = "; no share is shown to cost nothing on two texts, so this is the speed at the target's"
            note = (
                f"{_share(same[0]):.1%} of the neurons off, {sizes[1] / sizes[0]:.1%} of the parameters left, prompt of "
                f"{whole[0]['prompt']}; {'fp32' if form else 'in the scoring format'}; median of {len(speeds)} cells{'' if reached else none}"
            )
            found.append(Figure(name, ratio, target, unit="x", digits=3, note=note))
    return found


# -------------------------------------------------------------------------------------------- T15b


def tiny_figures(rows: Sequence[Row]) -> list[Figure]:
    """T15b: perplexity against the base's, neurons and single switches off together, on a tiny base far from home."""
    found = []
    for material, method, budget, target in _TINY:
        layout = "free" if method == FREE else "even"
        name = f"T15b {_TINY_BASE}, {material}: perplexity, {budget:.0%} of neurons ({layout}) and 1 % switches off"
        wanted = (material, _treatment(method, budget))
        tiny = (r for r in rows if r.cell.base.endswith(_TINY_BASE))
        row = next((r for r in tiny if (r.cell.material, r.cell.treatment) == wanted), None)
        base = base_of(row, rows) if row is not None else None
        if row is None or base is None:
            found.append(not_measured(name, target, "x", "its cells are not done", "lower"))
            continue
        won = gain(row, base)
        low, high = math.exp(-won.high), math.exp(-won.low)
        first = row.first
        note = (
            f"95 % [{low:.3f}, {high:.3f}]; {_share(row):.1%} of the neurons, {row.mean('share_off') or 0:.2%} of all weights "
            f"off; stopping loss {first['stopping_loss_of_base']:.3f} -> {first['stopping_loss_of_units']:.3f} with neurons -> "
            f"{row.stopping:.3f} with switches"
        )
        found.append(Figure(name, math.exp(-won.mean), target, "lower", "x", 3, note))
    return found


# --------------------------------------------------------------------------------------------- T16


def rival_figures(rows: Sequence[Row]) -> list[Figure]:
    """T16: structured against the rival that does best on the reported documents, at equal neurons, text by text."""
    found = []
    for budget in SHARES:
        name = f"T16 {budget:.0%} of neurons: nats per token below the best rival, lower end of the 95 % interval"
        measured = []
        for text in TEXTS:
            own = pick(rows, text.name, _treatment("structured", budget))
            rivals = [pick(rows, text.name, _treatment(f"units-{r}", budget)) for r in RIVALS]
            known = [r for r in rivals if r is not None]
            if own is not None and len(known) == len(RIVALS):
                best = max(known, key=lambda r: float(r.values().sum()))
                measured.append((text.name, best.cell.method.removeprefix("units-"), gain(own, best)))
        if not measured:
            found.append(
                not_measured(name, 0.0, "", f"no text has structured and {len(RIVALS)} rivals at {budget:.0%}")
            )
            continue
        least = min(measured, key=lambda m: m[2].low)[2].low
        note = "the least over texts; " + "; ".join(f"{text} against {r} {shown(i, 3)}" for text, r, i in measured)
        found.append(Figure(name, least if least != 0 else -1e-9, 0.0, unit="", digits=4, note=note))
    return found
