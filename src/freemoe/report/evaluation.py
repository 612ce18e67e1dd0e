"""The page of an evaluation (``freemoe eval -o result.json``). Reads result JSON only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from freemoe.core.errors import ArtifactError
from freemoe.evals.guessing import guessing_text
from freemoe.evals.verdict import GainVerdict, State, groups_text
from freemoe.report.figures.gain_figures import gain_intervals
from freemoe.report.page import (
    MOST_NAMED,
    STATES,
    PageTable,
    ReportPage,
    TableGroup,
    common_facts,
    judge_comparisons,
    provenance_line,
    record_line,
    render_page,
)
from freemoe.report.palette import row_role
from freemoe.report.reading import better, compared_rows, count_text, format_number, gain_with_unit, gain_words
from freemoe.results.evaluation import EvaluatedDomain, EvaluationResult

_HEADER = ("expert", "score", "gain [95 %]", "won / lost", "McNemar p", "documents")
_WORDS = {
    "base": "The model as it is, nothing switched off. Everything else is compared with it, document by document.",
    "auto": "Each document under the expert that the router picks from the prompt alone, or the base where it abstains.",
    "plan": "The artefact's plan of fewer experts alone, without hooks.",
    "trimmed": "The artefact: its plan and its hooks.",
    "hooks": "The artefact: its plan and its hooks.",
}
_CAPTION = "Dots: paired difference to the base on the same documents; lines: 95 % intervals."


def page_of(source: str | Path) -> Path:
    """Where the page of a result file is written: beside it, under its name."""
    return Path(source).with_suffix(".html")


def require_page_place(path: Path, overwrite: bool) -> None:
    """Raise unless a page can be written at a path.

    Raises:
        ArtifactError: Something stands there that may not be replaced: only a page of freemoe is, and only when asked.
    """
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise ArtifactError(f"{str(path)!r} exists already. Choose another -o, or --overwrite to replace it.")
    if not path.is_file() or b"<title>freemoe report" not in path.read_bytes()[:4096]:
        raise ArtifactError(
            f"{str(path)!r}, where the page goes, is no page of freemoe, and nothing else is replaced. Choose another -o, or move "
            "it away."
        )


def page(result: EvaluationResult) -> str:
    """The page of a result."""
    domains, recipe = result.domains, result.recipe
    names = list(dict.fromkeys(n for d in domains for n in d.rows))
    return render_page(
        ReportPage(
            title=f"Evaluation of {Path(recipe['artefact']).name or recipe['artefact']}",
            about=provenance_line(result, "nothing was chosen here"),
            verdict=evaluation_verdict(result),
            findings=[(state, words) for d in domains for state, words in _domain_findings(d)],
            heading="Scores on reported documents",
            table=PageTable(
                "Every row of a domain is scored on the same documents.",
                _HEADER,
                [_domain_group(d) for d in domains],
                (1, 2, 3, 4, 5),
            ),
            reading="Differences are paired, document by document, with 95 % intervals; documents with the same content are "
            "drawn together. Task scores are in per cent and gains in points; text is given as perplexity and as a ratio, where less is "
            "better. Intervals are per row; whether a row counts as better or worse is decided by p-values that all comparisons share (Holm).",
            readings=[
                (n, row_role(n), _WORDS.get(n, "Every document under this expert, whatever it is about."))
                for n in names
            ],
            pictures=(replace(gain_intervals, caption=_CAPTION),),
            splits=[
                record_line(result.seen if result.seen.known else None)
                if result.seen
                else "A plain model: there is no record of what it has seen."
            ],
            parts=[
                (
                    d.name,
                    f"{(of := d.set_aside['of']) - (aside := d.set_aside['documents'])} of {of} reported documents were scored; "
                    f"{aside} were set aside.",
                    d.notes,
                )
                for d in domains
            ],
            facts=[
                ("artefact", str(recipe["artefact"])),
                ("base", str(recipe.get("base") or "the artefact's own")),
                *common_facts(result),
            ],
            figures_in="the result file beside it",
        ),
        result,
    )


def _domain_group(domain: EvaluatedDomain) -> TableGroup:
    text = domain.is_text
    home = next(iter(domain.rows))
    rows = []
    for name, row in domain.rows.items():
        against = "" if name == home else gain_words(row, text)
        exact = name != home and row.won is not None
        rows.append(
            (
                row_role(name),
                (
                    name,
                    format_number(row.score),
                    against,
                    f"{row.won} / {row.lost}" if exact else "",
                    f"{row.mcnemar_p:.2g}" if exact else "",
                    str(row.documents),
                ),
            )
        )
    return TableGroup(rows, domain.name, "perplexity, lower is better" if text else "score in per cent")


def _row_state(domain: EvaluatedDomain, name: str) -> State:
    return STATES[better(domain.rows[name], domain.is_text)]


def _domain_findings(domain: EvaluatedDomain) -> list[tuple[State, str]]:
    text, home = domain.is_text, next(iter(domain.rows))
    guessed = guessing_text(domain.name, domain.guessing)
    verdicts = {"better": "better than", "same": "not distinguishable from", "worse": "worse than"}
    found: list[tuple[State, str]] = [
        (
            state := _row_state(domain, name),
            f"{domain.name}, {name}: {verdicts[state]} {home} on {domain.rows[name].documents} documents: "
            f"{format_number(domain.rows[home].score)} → {format_number(domain.rows[name].score)} ({gain_with_unit(domain.rows[name], text)}"
            + (f" {groups_text(domain.rows[name].clusters)})." if text else ")."),
        )
        for name in compared_rows(domain.rows)
    ]
    return [*found, ("fact", guessed)] if guessed else found


def evaluation_verdict(result: EvaluationResult) -> GainVerdict:
    """Whether any way to run the artefact is reliably better than the first one."""
    found: list[tuple[EvaluatedDomain, str, State]] = [
        (d, name, _row_state(d, name)) for d in result.domains for name in compared_rows(d.rows)
    ]
    if not found:
        scores = "; ".join(
            f"{d.name} {'perplexity ' if d.is_text else ''}{format_number(row.score)}{'' if d.is_text else ' %'} on {row.documents} documents"
            for d in result.domains[:MOST_NAMED]
            for row in d.rows.values()
        )
        return GainVerdict(
            "same", "Nothing to compare with", f"One model was scored, so there is no gain to speak of: {scores}."
        )
    of = f"{count_text(len(found), 'comparison')} with the base"
    told: list[tuple[State, str]] = [
        (state, f"{d.name}, {name}: {gain_with_unit(d.rows[name], d.is_text)}") for d, name, state in found
    ]
    if judged := judge_comparisons(told, "", of):
        return judged
    named = "; ".join(words for _, words in told[:MOST_NAMED])
    return GainVerdict("same", "No reliable gain", f"No: none of {of} shows a difference: {named}.")
