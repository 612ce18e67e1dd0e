"""The page of domain experts (``freemoe build``). Reads result JSON only.

Every number of the tables stands in a ``<data value="...">`` element, whose value is the result's own and whose text is rounded for
people.
"""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table
from rich.text import Text

from freemoe.domain_experts.figures.all_figures import FIGURES
from freemoe.domain_experts.prove.card import average_gain, control_text
from freemoe.domain_experts.result import BuildResult, DomainResult
from freemoe.evals.guessing import guessing_text
from freemoe.evals.verdict import GainVerdict, State, groups_text
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
    better,
    count_text,
    format_number,
    format_percent,
    gain_with_unit,
    gain_words,
)
from freemoe.results.scores import ROWS

_READING = (
    "Chosen on reference documents, measured on others. Differences are paired, document by document, with 95 % intervals; "
    "documents with the same content are drawn together. Task scores are in per cent and gains in points; text is given as perplexity "
    "and as a ratio to the base's, where less is better. Intervals are per row, not adjusted for the number of rows."
)
_SECTIONS = (("subdomains", "Subdomains"), ("abstained", "Abstained"), ("router", "Router"))
_ROW_STYLES = {"base": "dim", "expert": "bold", "routed": "bold", "control": "", "oracle": "dim italic"}
_ROW_NAMES = {"oracle": "oracle (selected on test)", "control": "control (random weights)"}

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


def tables(result: BuildResult) -> tuple[list[Table], list[str]]:
    """Tables for the terminal, and lines below them."""
    return [summary_table(result), subdomain_table(result)], []


def summary_table(result: BuildResult) -> Table:
    """Every domain's rows: score, paired gain over the base with its 95 % interval, documents won and lost."""
    table = Table(title="Held-out documents: score and paired difference to the base", title_justify="left")
    for column in ("domain", "row"):
        table.add_column(column)
    for column in ("score", "gain [95 %]", "won/lost", "documents"):
        table.add_column(column, justify="right")
    for domain in result.domains:
        text = domain.is_text
        unit = "perplexity, x of base" if text else f"{domain.metric} %, points"
        kept = f"{len(domain.accepted)} of {len(domain.subdomains)} subdomains have an expert"
        first = [f"{domain.name} ({unit})", kept]
        for name in ROWS:
            row = domain.rows.get(name)
            if row is None:
                continue
            won = f"{row.won}/{row.lost}" if row.won is not None and name != "base" else ""
            # Text, not str: a user's name, and an interval's brackets, are no markup.
            cells = (
                first.pop(0) if first else "",
                _ROW_NAMES.get(name, name),
                format_number(row.score),
                "" if name == "base" else gain_words(row, text),
                won,
                str(row.documents),
            )
            table.add_row(*(Text(cell) for cell in cells), style=_ROW_STYLES[name])
        table.add_section()
    return table


def subdomain_table(result: BuildResult) -> Table:
    """Every subdomain: documents, what was chosen, how much is off, score before and after, and the guard's verdict."""
    table = Table(title="Subdomains and the guard's verdicts", title_justify="left")
    for column in ("subdomain", "chosen"):
        table.add_column(column)
    for column in ("off %", "documents", "base", "expert", "gain [95 %]"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for domain in result.domains:
        text = domain.is_text
        for sub in domain.subdomains:
            base, expert = sub.rows.get("base"), sub.rows.get("expert")
            cells = (
                sub.name,
                sub.chosen,
                format_percent(sub.off_share),
                str(base.documents) if base else "0",
                format_number(base.score) if base else "–",
                format_number(expert.score) if expert else "–",
                gain_words(expert, text) if expert and sub.chosen != "base" else "–",
                sub.verdict,
            )
            table.add_row(*(Text(cell) for cell in cells), style="dim" if sub.chosen == "base" else "")
        table.add_section()
    return table


def page(result: BuildResult) -> str:
    """The page of a result."""
    domains, base = result.domains, result.base
    shown = [n for n in ROWS if any(n in d.rows for d in domains)]
    subdomains = [s for d in domains for s in d.subdomains]
    told = ReportPage(
        title=f"Domain experts for {base.name}",
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
        parts=[
            (
                d.name,
                f"{d.reference_documents} reference documents (to calibrate, choose and guard), {d.reported_documents} "
                f"reported documents (never searched); subdomains by {d.by}.",
                d.notes,
            )
            for d in domains
        ],
        facts=[
            ("base", base.name + (f" @ {base.revision}" if base.revision else "")),
            ("base fingerprint", base.fingerprint),
            (
                "base layout",
                f"{base.model_type}, {base.layers} layers, {base.parameters:,} parameters, of which "
                f"{base.weights:,} may be switched off; {base.dtype}",
            ),
            *common_facts(result),
            ("experts and router on disk", format_size(result.cost.artefact_bytes or 0)),
        ],
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
