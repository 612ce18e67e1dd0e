"""The figures of mixtures made from the model: T9 (a conversion against its rivals), and what hooks win back in a split one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Figure, not_measured
from benchmarks.pages import interval
from benchmarks.real_llm.cells import Cell
from benchmarks.real_llm.figures.rows import Finished
from benchmarks.real_llm.plan import CONVERTED, CURVES
from benchmarks.shares import gain_interval, share_bootstrap

_OWN = ("dense", "converted")
_FAMILIES = ("convert", "mixture", "trim")
_LEFT_OUT = ("cell", "name", "identity", "settings", "scores")
# The paper keeps 56.07 of 69.00 points at half of the weights (Llama-2-7B, Tab. 2).
_KEPT, _JUDGED = 81.0, 0.5


def mixture_figures(finished: Finished) -> list[Figure]:
    """Of every conversion and of the trim, measured or not."""
    return [*(figure for share in CONVERTED for figure in _converted(finished, share)), _trimmed(finished)]


def perplexity(score: dict[str, Any]) -> float:
    """Of the ``nll`` and ``tokens`` of a record's documents."""
    return math.exp(min(700.0, sum(score["nll"]) / sum(score["tokens"])))


def mixture_tables(finished: Finished) -> dict[str, Any]:
    """What is kept of these cells: perplexities and costs, without the scores of single blocks."""
    found: dict[str, Any] = {}
    for record in finished.values():
        family = record["cell"]["family"]
        if family not in _FAMILIES:
            continue
        entry = {k: v for k, v in record.items() if k not in _LEFT_OUT}
        if "scores" in record:
            entry["perplexity"] = {n: round(perplexity(s), 3) for n, s in record["scores"].items()}
            entry["accuracy"] = {n: round(sum(s["right"]) / sum(s["tokens"]), 4) for n, s in record["scores"].items()}
        found[record["name"]] = entry
    return found


# ----------------------------------------------------------------------------------------- convert


def _converted(finished: Finished, share: float) -> list[Figure]:
    names = (
        f"T9 {CURVES[0]}, {share:.0%} active: nats per token below the best rival, lower end of the 95 % interval",
        f"T9 {CURVES[0]}, {share:.0%} active: share of the dense model's next-token accuracy",
    )
    target = _KEPT if share == _JUDGED else None
    record = finished.get(Cell("convert", CURVES[0], "tomoe", share).name)
    if record is None:
        note = "its cell is not done"
        return [not_measured(names[0], 0.0, " nats", note), not_measured(names[1], target, " %", note)]
    scores = record["scores"]
    own, dense = scores["converted"], scores["dense"]
    # The best by what is reported: that favours the rivals.
    best = min((n for n in scores if n not in _OWN), key=lambda n: sum(scores[n]["nll"]))
    blocks = [str(i) for i in range(len(own["nll"]))]
    margin = gain_interval(np.subtract(scores[best]["nll"], own["nll"]), blocks, own["tokens"])
    kept = share_bootstrap([(own["right"], dense["right"], blocks)]).scaled(100)
    steps, tokens = record["training"]["steps"], record["training"]["batch_tokens"]
    shown = ", ".join(f"{n} {perplexity(s):.2f}" for n, s in scores.items())
    note = f"mean {margin.mean:.3f}; {record['experts']} experts, {steps} steps of {tokens} tokens; perplexity: {shown}"
    over = f"95 % over {len(blocks)} blocks [{kept.low:.1f}, {kept.high:.1f}]"
    return [
        Figure(names[0], margin.low, 0.0, unit=" nats", digits=3, note=note),
        Figure(names[1], kept.mean, target, unit=" %", digits=1, note=over),
    ]


# -------------------------------------------------------------------------------------------- trim


def _trimmed(finished: Finished) -> Figure:
    name = "split mixture, trimmed: share of the lost loss that hooks win back"
    trim = finished.get(Cell("trim", CURVES[0], "hooks").name)
    split = finished.get(Cell("mixture", CURVES[0], "split").name)
    if trim is None or split is None:
        return not_measured(name, None, " %", "its cells are not done")
    rows = trim["rows"]
    won: dict[str, list[float | None]] = {n: row["recovered_ce"] for n, row in rows.items() if "recovered_ce" in row}
    shown = ", ".join(f"{n} {_percent(won[n])}" for n in ("rescaled", "scale and bias", "control") if n in won)
    levels = ", ".join(f"{n} {math.exp(row['ce']):.2f}" for n, row in rows.items())
    best = won.get("hooks", [None])
    note = (
        f"95 % {_percent(best)}; the others: {shown}; Act {split['k']} -> {trim['plan']['act']:g} of {split['experts']} "
        f"experts; perplexity: {levels}; {split['what']}: dense {perplexity(split['scores']['dense']):.2f}, mixture "
        f"{perplexity(split['scores']['mixture']):.2f} ({perplexity(split['scores']['untrained']):.2f} before)"
    )
    return Figure(name, math.nan if best[0] is None else 100 * best[0], unit=" %", digits=1, note=note)


def _percent(share: Sequence[float | None]) -> str:
    return interval([v if v is None else 100 * v for v in share], 0, signed=False) or "nothing was lost"
