"""Reading a result: the file, its rows, and the words and numbers that tables, figures and the page share.

Every reader takes the plain result (`json.loads` of ``result.json``) and tolerates what a recipe left out: no control,
no oracle, no bands, a subdomain without reported documents.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from freemoe.core.errors import ArtifactError
from freemoe.core.numbers import decimals
from freemoe.core.run.execute import RESULT_FORMAT
from freemoe.domain_experts.prove.card import ROWS, control_text
from freemoe.evals.guessing import guessing_text
from freemoe.evals.statistics import MIN_CHANGED, MIN_CLUSTERS
from freemoe.evals.verdict import groups_text
from freemoe.results import read_result
from freemoe.results.build import KIND

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


def load_result(folder: str | Path) -> dict[str, Any]:
    """Read and check ``result.json`` of an artefact's folder.

    Args:
        folder: The artefact, or the result file itself.

    Raises:
        ArtifactError: When there is no result, or it is damaged, of another kind or of another format.
    """
    return check_result(read_result(folder), str(folder))


def check_result(result: Any, source: str = "the result") -> dict[str, Any]:
    """Return the result if a report can be made of it.

    Raises:
        ArtifactError: With what is wrong and what to do.
    """
    if not isinstance(result, dict):
        raise ArtifactError(f"{source}: a result is a mapping, got {type(result).__name__}. Build the artefact anew.")
    if result.get("kind") != KIND:
        raise ArtifactError(f"{source} is of kind {result.get('kind')!r}; reports are made of {KIND!r}.")
    if result.get("format") != RESULT_FORMAT:
        raise ArtifactError(
            f"{source} has format {result.get('format')!r}; this freemoe reads format {RESULT_FORMAT}. Install a freemoe that fits."
        )
    missing = [name for name in ("recipe", "base", "domains", "router", "environment", "cost") if name not in result]
    if not missing:
        for number, domain in enumerate(result["domains"]):
            needed = ("name", "metric", "unit", "rows", "subdomains", "documents")
            missing += [f"domains.{number}.{name}" for name in needed if name not in domain]
            if "base" not in domain.get("rows", {}):
                missing.append(f"domains.{number}.rows.base")
    if missing:
        raise ArtifactError(f"{source} lacks {', '.join(missing)}: it is cut short or edited. Build the artefact anew.")
    return result


def is_text(domain: dict[str, Any]) -> bool:
    """Whether a domain's figure is perplexity (lower is better) rather than points."""
    return domain["unit"] == "perplexity"


def gained(row: dict[str, Any], text: bool) -> str:
    """A row against the base with its interval, unit included."""
    return f"perplexity {gain_words(row, True)} the base's" if text else f"{gain_words(row, False)} points"


def interval_of(row: dict[str, Any], text: bool) -> tuple[float, float, float]:
    """Mean, low and high of a row against the base: the perplexity ratio of text, else the paired gain in points."""
    seen = row["ratio" if text else "gain"]
    low, high = seen["low"], seen["high"]
    return seen["mean"], -math.inf if low is None else low, math.inf if high is None else high


def better(row: dict[str, Any], text: bool) -> int:
    """1 if the row is reliably better than the base, -1 if it is worse, 0 where neither is shown.

    By its 95 % interval; by Holm's p-value where the rows of a call were tested together. Too few independent documents or
    changed answers show nothing.
    """
    mean, low, high = interval_of(row, text)
    changed = row["won"] + row["lost"] if row.get("won") is not None else MIN_CHANGED
    if (row.get("clusters") or MIN_CLUSTERS) < MIN_CLUSTERS or changed < MIN_CHANGED:
        return 0
    if row.get("holm") is not None:
        return 0 if row["holm"] > 0.05 else improves(mean, text)
    if text:
        return 1 if high < 1 else -1 if low > 1 else 0
    return 1 if low > 0 else -1 if high < 0 else 0


def accepted(domain: dict[str, Any]) -> list[dict[str, Any]]:
    """Subdomains of a domain whose expert is not the base."""
    return [s for s in domain["subdomains"] if s["chosen"] != "base"]


def with_rows(domain: dict[str, Any]) -> list[dict[str, Any]]:
    """Subdomains of a domain that have reported documents."""
    return [s for s in domain["subdomains"] if s.get("rows", {}).get("base")]


def candidate_gains(subdomain: dict[str, Any], text: bool) -> dict[str, float]:
    """Gain of every candidate on the reported documents: points above the base, or the perplexity ratio of text."""
    base = subdomain.get("rows", {}).get("base", {}).get("score")
    if base is None:
        return {}
    gains = {n: s / base if text else s - base for n, s in subdomain.get("candidates", {}).items()}
    return {n: g for n, g in gains.items() if math.isfinite(g) and (g > 0 or not text)}


def improves(gain: float, text: bool) -> int:
    """1 for a candidate's gain on the better side, -1 on the worse side, 0 for none."""
    return (gain < 1) - (gain > 1) if text else (gain > 0) - (gain < 0)


def compared_rows(rows: dict[str, Any]) -> list[str]:
    """Names of the rows that are compared with the base (where there is none, with the first): known ones first."""
    home = "base" if "base" in rows else next(iter(rows))
    return [n for n in COMPARED if n in rows and n != home] + [n for n in rows if n not in (*ROWS, home)]


def abstentions(domain: dict[str, Any]) -> tuple[int, int]:
    """Documents on which the router abstained, and all."""
    return sum(d["routed_to"] == "base" for d in domain["documents"]), len(domain["documents"])


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number for people; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and abs(value) >= 10**6:
        return f"{value:{'+' if sign else ''}.2e}"
    return f"{value:+.{digits}f}" if sign else decimals(value, digits)


def percent(share: float) -> str:
    """A small share in per cent with two significant digits."""
    return "0" if not share else f"{100 * share:.2g}"


def gain_words(row: dict[str, Any], text: bool) -> str:
    """A row against the base with its interval, in words."""
    mean, low, high = interval_of(row, text)
    digits = 3 if text else 1
    ends = [number(end, digits, not text) for end in (low, high)] if any(map(math.isfinite, (low, high))) else []
    return ("× " if text else "") + number(mean, digits, not text) + (f" [{', '.join(ends)}]" if ends else "")


def plural(count: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{count} {noun}" + ("s" if count != 1 else "")


def domain_sentence(result: dict[str, Any], domain: dict[str, Any]) -> str:
    """What was found in one domain, and what was not, in one or two honest sentences."""
    rows, text = domain["rows"], is_text(domain)
    base, expert, chosen = rows["base"], rows["expert"], accepted(domain)
    unit, digits = ("perplexity", 2) if text else (domain["metric"], 1)
    guess = guessing_text(domain["name"], domain.get("guessing"))
    said = f" {guess[0].upper()}{guess[1:]}." if guess else ""
    if not chosen:
        return (
            f"{domain['name']}: no reliable gain was found; the base answers everything "
            f"({unit} {number(base['score'], digits)} on {base['documents']} held-out documents).{said}"
        )
    state = better(expert, text)
    verdict = {1: "better than the base", 0: "not distinguishable from the base", -1: "worse than the base"}[state]
    gain = gain_words(expert, text) + (f" {groups_text(expert.get('clusters'))}" if text else " points")
    words = (
        f"{domain['name']}: {verdict} on {expert['documents']} held-out documents: {unit} "
        f"{number(base['score'], digits)} → {number(expert['score'], digits)} ({gain}), with experts in {len(chosen)} of "
        f"{plural(len(domain['subdomains']), 'subdomain')}."
    )
    if routed := rows.get("routed"):
        words += f" Routed from the prompt alone: {number(routed['score'], digits)} ({gain_words(routed, text)})."
    if against := control_text(domain):
        words += f" {against[0].upper()}{against[1:]}."
    if result["recipe"].get("search", {}).get("select") == "argmax":
        words += " The choice was not guarded (argmax, the papers' rule)."
    return words + said
