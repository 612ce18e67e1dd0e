"""Finished cells joined into rows: the best rate by the stopping loss, the mean over seeds, paired with the base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.real_llm.cells import BASE, Cell
from benchmarks.shares import gain_interval, share_bootstrap
from freemoe.domain_experts.select.choice import CandidateVerdict, adjust_verdicts
from freemoe.evals.statistics import Interval, paired_test

Finished = dict[str, dict[str, Any]]


def decided(losses: Sequence[float]) -> float:
    """Best stopping loss, by which a rate or a budget is chosen; infinite where nothing was looked at."""
    return min(losses, default=math.inf)


@dataclass(frozen=True)
class Row:
    """One method with one setting on one material: the chosen record of every seed, and among how many rates it was chosen."""

    cell: Cell
    records: tuple[dict[str, Any], ...]
    rates: int

    @property
    def first(self) -> dict[str, Any]:
        """The record of the first seed."""
        return self.records[0]

    @property
    def text(self) -> bool:
        """Whether its figure is the loss of text."""
        return self.first["kind"] == "text"

    @property
    def keys(self) -> list[str]:
        """Content keys of the reported documents."""
        return self.first["keys"]

    @property
    def stopping(self) -> float:
        """Mean over seeds of the best stopping loss."""
        return float(np.mean([decided(r["losses"]) for r in self.records]))

    def mean(self, entry: str) -> float | None:
        """Mean over seeds of a number of the record; None where it has none."""
        values = [r.get(entry) for r in self.records]
        return float(np.mean(values)) if all(v is not None for v in values) else None  # type: ignore[arg-type]

    def values(self) -> np.ndarray:
        """Per reported document, higher is better, mean over seeds: minus nats, or share of right answers."""
        name, sign = ("nll", -1.0) if self.text else ("right", 1.0)
        return sign * np.mean([r[name] for r in self.records], 0)


def rows_of(finished: Finished, family: str) -> list[Row]:
    """Every row of a family, in the order of the plan."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for record in finished.values():
        cell = Cell.read(record["cell"])
        if cell.family == family:
            groups.setdefault((cell.base, cell.material, cell.documents, cell.treatment), []).append(record)
    found = []
    for records in groups.values():
        by_seed: dict[int, list[dict[str, Any]]] = {}
        for record in records:
            by_seed.setdefault(record["cell"]["seed"], []).append(record)
        rates = max(map(len, by_seed.values()))
        # A seed that has not tried every rate yet would be a weaker rival: it waits.
        whole = [by_seed[s] for s in sorted(by_seed) if len(by_seed[s]) == rates]
        chosen = tuple(min(tried, key=lambda r: decided(r["losses"])) for tried in whole)
        found.append(Row(Cell.read(chosen[0]["cell"]), chosen, rates))
    return found


def base_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The base on the same material; None where it has not been measured."""
    same = (row.cell.base, row.cell.material, row.cell.documents)
    for other in rows:
        cell = other.cell
        if cell.method == BASE and (cell.base, cell.material, cell.documents) == same:
            return other
    return None


def pick(rows: Sequence[Row], material: str, treatment: str) -> Row | None:
    """The row of a material and treatment on the benchmark's own base."""
    for row in rows:
        if (row.cell.material, row.cell.treatment, row.cell.base) == (material, treatment, ""):
            return row
    return None


def tokens(row: Row) -> float:
    """Scored tokens of the reported documents of a text."""
    return float(sum(row.records[0]["tokens"]))


def gains(row: Row, base: Row) -> np.ndarray:
    """Paired differences to the base per reported document, higher is better."""
    if row.records[0]["ids"] != base.records[0]["ids"]:
        raise ValueError(f"{row.cell.name} and {base.cell.name} were reported on different documents")
    return row.values() - base.values()


def gain(row: Row, base: Row) -> Interval:
    """Gain with its 95 % interval over documents: nats per token for text, points for questions."""
    return gain_interval(gains(row, base), row.keys, base.first["tokens"] if row.text else None)


def share(row: Row, rival: Row, base: Row) -> Interval:
    """Share of a rival's gain, with its 95 % interval over documents."""
    return share_bootstrap([(gains(row, base).tolist(), gains(rival, base).tolist(), row.keys)])


def verdict(row: Row, base: Row) -> CandidateVerdict | None:
    """The guard's test of the first seed's result, on reference documents that neither trained nor stopped it.

    None where no document guards it. What stopped at its start is the base and has no gain, whatever rounding says.
    """
    before = {s: v for r in base.records for s, v in zip(r["guard"]["ids"], r["guard"]["values"], strict=True)}
    guard = row.records[0]["guard"]
    if not guard["ids"] or any(i not in before for i in guard["ids"]):
        return None
    # What begins with a cut has no way back to the base.
    stopped = (
        "units" not in row.first and bool(row.first["losses"]) and min(row.first["losses"]) == row.first["losses"][0]
    )
    differences = [0.0 if stopped else v - before[i] for i, v in zip(guard["ids"], guard["values"], strict=True)]
    p = paired_test(differences, guard["keys"])
    return CandidateVerdict(row.cell.method, row.cell.treatment, float(np.mean(differences)), p, len(differences))


def accepted(pairs: Sequence[tuple[Row, Row]]) -> list[bool]:
    """Which of several rows the guard of one build would accept, all of them tested together (Holm)."""
    verdicts = [verdict(row, base) for row, base in pairs]
    adjusted = iter(adjust_verdicts([[v] for v in verdicts if v is not None]))
    found = []
    for known in verdicts:
        one = next(adjusted)[0] if known is not None else None
        found.append(one is not None and one.holm is not None and one.holm <= 0.05 and one.gain > 0)
    return found


def as_numbers(interval: Interval, digits: int = 4) -> list[float | None]:
    """Mean, low and high for JSON, which knows no infinity and no NaN."""
    values = (interval.mean, interval.low, interval.high)
    return [round(v, digits) if math.isfinite(v) else None for v in values]
