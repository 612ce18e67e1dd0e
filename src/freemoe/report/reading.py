"""The words and numbers of a result's rows that tables, figures and the page share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from freemoe.core.numbers import format_decimals
from freemoe.domain_experts.prove.card import ROWS, control_text
from freemoe.evals.guessing import guessing_text
from freemoe.evals.statistics import MIN_CHANGED, MIN_CLUSTERS
from freemoe.evals.verdict import groups_text
from freemoe.results.build import BuildResult, DomainResult, ScoreRow, SubdomainResult

COMPARED = tuple(row for row in ROWS if row != "base")

# What a row may and may not be read as.
READINGS = {
    "base": "The frozen model as it is, nothing switched off. Everything else is compared with it, document by document.",
    "expert": 'Each document under the expert of its known subdomain ("DENoise", "DOWP" in the papers). It says what the '
    "experts can do when the right one is picked; in use the router has to pick it.",
    "routed": "Each document under the expert that the router picks from the prompt alone, or the base where it abstains "
    '("MoDE", "Free-MoE"). This is what a user of the artefact gets.',
    "control": "Random weights switched off, per matrix as many and as large as the expert of the subdomain has, averaged over "
    "several draws, which the interval counts. A gain that the control has as well does not come from which weights were chosen.",
    "oracle": "Selected on test: per subdomain the candidate that is best on these very documents, as the papers' tables "
    "report it. It is biased upwards, so that no interval would hold, and is not a result; it only bounds what any choice among these candidates "
    "could have reached here.",
}


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


def with_rows(domain: DomainResult) -> list[SubdomainResult]:
    """Subdomains of a domain that have reported documents."""
    return [s for s in domain.subdomains if "base" in s.rows]


def candidate_gains(subdomain: SubdomainResult, text: bool) -> dict[str, float]:
    """Gain of every candidate on the reported documents: points above the base, or the perplexity ratio of text."""
    if "base" not in subdomain.rows:
        return {}
    base = subdomain.rows["base"].score
    gains = {n: s / base if text else s - base for n, s in subdomain.candidates.items()}
    return {n: g for n, g in gains.items() if math.isfinite(g) and (g > 0 or not text)}


def gain_sign(gain: float, text: bool) -> int:
    """1 for a candidate's gain on the better side, -1 on the worse side, 0 for none."""
    return (gain < 1) - (gain > 1) if text else (gain > 0) - (gain < 0)


def compared_rows(rows: Mapping[str, ScoreRow]) -> list[str]:
    """Names of the rows that are compared with the base (where there is none, with the first): known ones first."""
    home = "base" if "base" in rows else next(iter(rows))
    return [n for n in COMPARED if n in rows and n != home] + [n for n in rows if n not in (*ROWS, home)]


def abstentions(domain: DomainResult) -> tuple[int, int]:
    """Documents on which the router abstained, and all."""
    return sum(d["routed_to"] == "base" for d in domain.documents), len(domain.documents)


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


def domain_sentence(result: BuildResult, domain: DomainResult) -> str:
    """What was found in one domain, and what was not, in one or two honest sentences."""
    rows, text = domain.rows, domain.is_text
    base, expert, chosen = rows["base"], rows["expert"], domain.accepted
    unit, digits = ("perplexity", 2) if text else (domain.metric, 1)
    guess = guessing_text(domain.name, domain.guessing)
    said = f" {guess[0].upper()}{guess[1:]}." if guess else ""
    if not chosen:
        return (
            f"{domain.name}: no reliable gain was found; the base answers everything "
            f"({unit} {format_number(base.score, digits)} on {base.documents} held-out documents).{said}"
        )
    state = better(expert, text)
    verdict = {1: "better than the base", 0: "not distinguishable from the base", -1: "worse than the base"}[state]
    gain = gain_words(expert, text) + (f" {groups_text(expert.clusters)}" if text else " points")
    words = (
        f"{domain.name}: {verdict} on {expert.documents} held-out documents: {unit} "
        f"{format_number(base.score, digits)} → {format_number(expert.score, digits)} ({gain}), with experts in {len(chosen)} of "
        f"{count_text(len(domain.subdomains), 'subdomain')}."
    )
    if routed := rows.get("routed"):
        words += f" Routed from the prompt alone: {format_number(routed.score, digits)} ({gain_words(routed, text)})."
    if against := control_text(domain):
        words += f" {against[0].upper()}{against[1:]}."
    if result.recipe.get("search", {}).get("select") == "argmax":
        words += " The choice was not guarded (argmax, the papers' rule)."
    return words + said
