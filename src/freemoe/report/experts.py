"""The page of domain experts (``freemoe build``). Reads result JSON only.

Every number of the tables stands in a ``<data value="...">`` element, whose value is the result's own and whose text is rounded for
people.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freemoe.domain_experts.prove.card import ROWS, average_gain
from freemoe.evals.verdict import State, Verdict
from freemoe.report.figures.all_figures import FIGURES
from freemoe.report.page import STATES, Page, common_facts, made, size, write_page
from freemoe.report.page import render as render_page
from freemoe.report.reading import (
    COMPARED,
    READINGS,
    accepted,
    better,
    check_result,
    domain_sentence,
    gained,
    is_text,
    plural,
)

_MOST_NAMED = 4
_READING = (
    "Chosen on reference documents, measured on others. Differences are paired, document by document, with 95 % intervals; "
    "documents with the same content are drawn together. Task scores are in per cent and gains in points; text is given as perplexity "
    "and as a ratio to the base's, where less is better. Intervals are per row, not adjusted for the number of rows."
)
_SECTIONS = (("subdomains", "Subdomains"), ("abstained", "Abstained"), ("router", "Router"))


def render(result: dict[str, Any]) -> str:
    """The page of a result.

    Args:
        result: What stands in ``result.json``.

    Raises:
        ArtifactError: When no report can be made of it.
    """
    check_result(result)
    domains = result["domains"]
    shown = [n for n in ROWS if any(n in d["rows"] for d in domains)]
    subdomains = [s for d in domains for s in d["subdomains"]]
    page = Page(
        title=f"Domain experts for {result['base']['name']}",
        about=made(result, "no weight of the base was changed, some are switched off"),
        verdict=verdict(result),
        findings=[(_state(d), domain_sentence(result, d)) for d in domains],
        notes=result.get("notes") or (),
        heading="Scores on held-out documents",
        reading=_READING,
        readings=[(name, name, READINGS[name]) for name in shown],
        pictures=FIGURES,
        splits=_seen(result),
        parts=[(d["name"], _split(d), d["notes"]) for d in domains],
        facts=_facts(result),
        recipe=result["recipe"],
        more_sections=_SECTIONS,
    )
    return render_page(
        page,
        result,
        "experts.html.j2",
        ROWS=ROWS,
        COMPARED=COMPARED,
        shown_rows=shown,
        kept_base=[s for s in subdomains if s["chosen"] == "base"],
        forecasts=[(s["name"], s["forecast"]) for s in subdomains if s.get("forecast")],
        contents=[(s["name"], s["holds"]) for s in subdomains if s.get("holds")],
    )


def write_report(source: str | Path) -> Path:
    """Read an artefact's ``result.json`` and write its page beside it.

    Raises:
        ArtifactError: When there is no result, it is damaged, or the page cannot be written.
    """
    return write_page(source, render)


def verdict(result: dict[str, Any]) -> Verdict:
    """Whether the experts are reliably better than the base, by the rows of known subdomains."""
    domains = result["domains"]
    found: dict[State, list[dict[str, Any]]] = {"better": [], "same": [], "worse": []}
    for domain in domains:
        found[_state(domain)].append(domain)
    gains = "; ".join(_gain(d) for d in (found["better"] + found["worse"])[:_MOST_NAMED])
    more = len(found["better"] + found["worse"]) - _MOST_NAMED
    gains += f"; and {more} more below" if more > 0 else ""
    count = plural(len(domains), "domain")
    chosen, of = sum(len(accepted(d)) for d in domains), sum(len(d["subdomains"]) for d in domains)
    rest = f" An expert was accepted in {chosen} of {plural(of, 'subdomain')}" + (
        "." if chosen == of else "; where none was, the base answers."
    )
    if average := average_gain(result):
        rest += f" {average[0].upper()}{average[1:]}."
    worse = f", worse in {len(found['worse'])}" if found["worse"] else ""
    if found["better"]:
        label = "Reliable gain" if len(found["better"]) == len(domains) else "Reliable gain in part"
        words = f"Yes: better than the base on held-out documents in {len(found['better'])} of {count}{worse}: {gains}."
        return Verdict("better", label, words + rest)
    if found["worse"]:
        words = f"No: worse than the base on held-out documents in {len(found['worse'])} of {count}: {gains}."
        return Verdict("worse", "Worse than the base", words + rest)
    tried = "; ".join(_gain(d) for d in domains[:_MOST_NAMED] if accepted(d))
    words = f"No: in none of {count} is a gain shown on held-out documents"
    return Verdict("same", "No reliable gain", words + (f": {tried}." if tried else ".") + rest)


def _gain(domain: dict[str, Any]) -> str:
    return f"{domain['name']} {gained(domain['rows']['expert'], is_text(domain))}"


def _state(domain: dict[str, Any]) -> State:
    """How a domain is marked: better, worse, or the same as the base."""
    if not accepted(domain):
        return "same"
    return STATES[better(domain["rows"]["expert"], is_text(domain))]


def _seen(result: dict[str, Any]) -> list[str]:
    if "seen" not in result:
        return []
    seen = result["seen"]
    return [
        f"{seen['file']} beside this page knows the {seen['documents']} documents that the making of this artefact saw, as hashes; "
        "freemoe eval sets them aside."
    ]


def _split(domain: dict[str, Any]) -> str:
    return (
        f"{domain['reference_documents']} reference documents (to calibrate, choose and guard), {domain['reported_documents']} "
        f"reported documents (never searched); subdomains by {domain['by']}."
    )


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Provenance: what made the result, of what, where and at what cost."""
    base = result["base"]
    return [
        ("base", str(base["name"]) + (f" @ {base['revision']}" if base.get("revision") else "")),
        ("base fingerprint", str(base["fingerprint"])),
        (
            "base layout",
            f"{base['model_type']}, {base['layers']} layers, {base['parameters']:,} parameters, of which "
            f"{base['weights']:,} may be switched off; {base['dtype']}",
        ),
        *common_facts(result),
        ("experts and router on disk", size(result["cost"]["artefact_bytes"])),
    ]
