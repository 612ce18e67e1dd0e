"""The page of domain experts (``freemoe build``). Reads result JSON only.

Every number of the tables stands in a ``<data value="...">`` element, whose value is the result's own and whose text is rounded for
people.
"""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table

from freemoe.domain_experts.prove.card import ROWS, average_gain
from freemoe.evals.verdict import GainVerdict, State
from freemoe.report.figures.all_figures import FIGURES
from freemoe.report.page import (
    MOST_NAMED,
    STATES,
    ReportPage,
    common_facts,
    format_size,
    judge_comparisons,
    provenance_line,
    render_page,
)
from freemoe.report.reading import (
    COMPARED,
    READINGS,
    better,
    count_text,
    domain_sentence,
    gain_with_unit,
)
from freemoe.report.tables import subdomain_table, summary_table
from freemoe.results.build import BuildResult, DomainResult

_READING = (
    "Chosen on reference documents, measured on others. Differences are paired, document by document, with 95 % intervals; "
    "documents with the same content are drawn together. Task scores are in per cent and gains in points; text is given as perplexity "
    "and as a ratio to the base's, where less is better. Intervals are per row, not adjusted for the number of rows."
)
_SECTIONS = (("subdomains", "Subdomains"), ("abstained", "Abstained"), ("router", "Router"))


def tables(result: BuildResult) -> tuple[list[Table], list[str]]:
    """Tables for the terminal, and lines below them."""
    return [summary_table(result), subdomain_table(result)], []


def page(result: BuildResult) -> str:
    """The page of a result."""
    domains = result.domains
    shown = [n for n in ROWS if any(n in d.rows for d in domains)]
    subdomains = [s for d in domains for s in d.subdomains]
    told = ReportPage(
        title=f"Domain experts for {result.base.name}",
        about=provenance_line(result, "no weight of the base was changed, some are switched off"),
        verdict=build_verdict(result),
        findings=[(_domain_state(d), domain_sentence(result, d)) for d in domains],
        heading="Scores on held-out documents",
        reading=_READING,
        readings=[(name, name, READINGS[name]) for name in shown],
        pictures=FIGURES,
        splits=[
            f"{result.seen.file} beside this page knows the {result.seen.documents} documents that the making of this artefact saw, "
            "as hashes; freemoe eval sets them aside."
        ],
        parts=[(d.name, _split_sentence(d), d.notes) for d in domains],
        facts=_provenance_facts(result),
        more_sections=_SECTIONS,
    )
    return render_page(
        told,
        result,
        "experts.html.j2",
        ROWS=ROWS,
        COMPARED=COMPARED,
        shown_rows=shown,
        kept_base=[s for s in subdomains if s.chosen == "base"],
        forecasts=[(s.name, s.forecast) for s in subdomains if s.forecast],
        contents=[(s.name, s.holds) for s in subdomains if s.holds],
    )


def build_verdict(result: BuildResult) -> GainVerdict:
    """Whether the experts are reliably better than the base, by the rows of known subdomains."""
    domains = result.domains
    chosen, of = sum(len(d.accepted) for d in domains), sum(len(d.subdomains) for d in domains)
    rest = f" An expert was accepted in {chosen} of {count_text(of, 'subdomain')}" + (
        "." if chosen == of else "; where none was, the base answers."
    )
    if average := average_gain(result):
        rest += f" {average[0].upper()}{average[1:]}."
    count = count_text(len(domains), "domain")
    found = judge_comparisons(
        [(_domain_state(d), _expert_gain(d)) for d in domains], " than the base on held-out documents", count
    )
    if found is None:
        tried = "; ".join(_expert_gain(d) for d in domains[:MOST_NAMED] if d.accepted)
        words = f"No: in none of {count} is a gain shown on held-out documents"
        found = GainVerdict("same", "No reliable gain", words + (f": {tried}." if tried else "."))
    return replace(found, words=found.words + rest)


def _expert_gain(domain: DomainResult) -> str:
    return f"{domain.name} {gain_with_unit(domain.rows['expert'], domain.is_text)}"


def _domain_state(domain: DomainResult) -> State:
    """How a domain is marked: better, worse, or the same as the base."""
    if not domain.accepted:
        return "same"
    return STATES[better(domain.rows["expert"], domain.is_text)]


def _split_sentence(domain: DomainResult) -> str:
    return (
        f"{domain.reference_documents} reference documents (to calibrate, choose and guard), {domain.reported_documents} "
        f"reported documents (never searched); subdomains by {domain.by}."
    )


def _provenance_facts(result: BuildResult) -> list[tuple[str, str]]:
    """Provenance: what made the result, of what, where and at what cost."""
    base = result.base
    return [
        ("base", base.name + (f" @ {base.revision}" if base.revision else "")),
        ("base fingerprint", base.fingerprint),
        (
            "base layout",
            f"{base.model_type}, {base.layers} layers, {base.parameters:,} parameters, of which "
            f"{base.weights:,} may be switched off; {base.dtype}",
        ),
        *common_facts(result),
        ("experts and router on disk", format_size(result.cost.artefact_bytes or 0)),
    ]
