"""The words and numbers of a result's rows that tables, figures and the page share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from freemoe.core.numbers import format_decimals
from freemoe.evals.statistics import MIN_CHANGED, MIN_CLUSTERS
from freemoe.results.scores import ROWS, ScoreRow, SecondaryScore

COMPARED = tuple(row for row in ROWS if row != "base")


def gain_with_unit(row: ScoreRow, text: bool) -> str:
    """A row against the base with its interval, unit included."""
    return f"perplexity {gain_words(row, True)} the base's" if text else f"{gain_words(row, False)} points"


def interval_of(row: ScoreRow, text: bool) -> tuple[float, float, float]:
    """Mean, low and high of a row against the base: the perplexity ratio of text, else the paired gain in points."""
    seen: Any = row.ratio if text else row.gain
    return seen.mean, -math.inf if seen.low is None else seen.low, math.inf if seen.high is None else seen.high


def better(row: ScoreRow, text: bool) -> int:
    """1 if the row is reliably better than the base, -1 if it is worse, 0 where neither is shown.

    By its 95 % interval; by Holm's p-value where the rows of a call were tested together. Too few independent documents or
    changed answers show nothing.
    """
    mean, low, high = interval_of(row, text)
    changed = MIN_CHANGED if row.won is None or row.lost is None else row.won + row.lost
    if (row.clusters or MIN_CLUSTERS) < MIN_CLUSTERS or changed < MIN_CHANGED:
        return 0
    if row.holm is not None:
        return 0 if row.holm > 0.05 else gain_sign(mean, text)
    if text:
        return 1 if high < 1 else -1 if low > 1 else 0
    return 1 if low > 0 else -1 if high < 0 else 0


def gain_sign(gain: float, text: bool) -> int:
    """1 for a candidate's gain on the better side, -1 on the worse side, 0 for none."""
    return (gain < 1) - (gain > 1) if text else (gain > 0) - (gain < 0)


def compared_rows(rows: Mapping[str, ScoreRow]) -> list[str]:
    """Names of the rows that are compared with the base (where there is none, with the first): known ones first."""
    home = "base" if "base" in rows else next(iter(rows))
    return [n for n in COMPARED if n in rows and n != home] + [n for n in rows if n not in (*ROWS, home)]


def format_number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number for people; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and abs(value) >= 10**6:
        return f"{value:{'+' if sign else ''}.2e}"
    return f"{value:+.{digits}f}" if sign else format_decimals(value, digits)


def format_percent(share: float) -> str:
    """A small share in per cent with two significant digits."""
    return "0" if not share else f"{100 * share:.2g}"


def gain_words(row: ScoreRow, text: bool) -> str:
    """A row against the base with its interval, in words."""
    mean, low, high = interval_of(row, text)
    digits = 3 if text else 1
    ends = [format_number(end, digits, not text) for end in (low, high)] if any(map(math.isfinite, (low, high))) else []
    return ("× " if text else "") + format_number(mean, digits, not text) + (f" [{', '.join(ends)}]" if ends else "")


def count_text(count: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{count} {noun}" + ("s" if count != 1 else "")


def gain_text(row: ScoreRow | SecondaryScore, unit: str) -> str:
    """A row's paired difference to the base with its interval, where it has one, in words."""
    if unit == "perplexity":
        return f"x {with_ends(row.ratio, lambda end: format_decimals(end, 3))}"
    return with_ends(row.gain, "{:+.1f}".format)


def with_ends(seen: Any, shown: Callable[[float], str]) -> str:
    """A mean in words, with its interval where there is one."""
    ends = [seen.low, seen.high]
    return shown(seen.mean) + (
        "" if ends == [None, None] else f" [{', '.join('-' if e is None else shown(e) for e in ends)}]"
    )
