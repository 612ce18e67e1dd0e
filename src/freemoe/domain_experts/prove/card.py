"""The model card and the table that stand beside an artefact; both read the result, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freemoe.core import neutral
from freemoe.core.numbers import format_decimals, format_percent
from freemoe.core.version import __version__
from freemoe.domain_experts.result import BuildResult, DomainResult
from freemoe.evals.guessing import guessing_text
from freemoe.evals.held_out import record_text
from freemoe.evals.verdict import groups_text
from freemoe.hub.cards import CardMetric, base_shown, card_header, card_notes, loading_example
from freemoe.report.reading import gain_text, with_ends
from freemoe.results.common import IntervalResult
from freemoe.results.scores import ROWS


def control_text(domain: DomainResult) -> str:
    """What the expert gains over random weights of the same magnitudes; nothing where there were none."""
    row = domain.rows.get("expert")
    if row is None or (over := row.over_control) is None:
        return ""
    shown = with_ends(over, "{:+.3f}".format if domain.is_text else "{:+.1f}".format)
    verdict = (
        "one draw, so no interval" if over.low is None and len(domain.rows["control"].seeds or ()) == 1
        else "which weights are off matters" if over.low is not None and over.low > 0
        else "not shown that it matters which weights are off"
    )  # fmt: skip
    unit = "nats per token" if domain.is_text else "points"
    return f"expert minus control (random weights of the same magnitudes): {shown} {unit}, {verdict}"


def average_gain(result: BuildResult) -> str:
    """The average gain over the domains that are scored in points; nothing for fewer than two."""
    mean, domains = result.overall.get("expert"), result.overall.get("domains", ())
    if not mean or len(domains) < 2:
        return ""
    return (
        f"average gain over {len(domains)} domains (0 where the base stayed; text left out): "
        f"{with_ends(IntervalResult(**mean), '{:+.2f}'.format)} points"
    )


def headlines(result: BuildResult) -> list[str]:
    """One line per domain and subdomain: what was found, in numbers that anyone can check in the result."""
    lines = []
    for domain in result.domains:
        base, expert = domain.rows["base"], domain.rows["expert"]
        gain = gain_text(expert, domain.unit)
        if domain.is_text:
            share = 100 * sum(s.off for s in domain.subdomains) / max(1, result.base.weights)
            lines.append(
                f"{domain.name}: held-out perplexity {base.score:.2f} -> {expert.score:.2f} ({gain} "
                f"{groups_text(expert.clusters)}, {share / max(1, len(domain.subdomains)):.2g} % of weights off)"
            )
        else:
            lines.append(
                f"{domain.name}: {domain.metric} {base.score:.1f} -> {expert.score:.1f} "
                f"({gain} points, {domain.reported_documents} held-out documents)"
            )
        lines += [f"  {domain.name}: {said}"] if (said := control_text(domain)) else []
        lines += [said] if (said := guessing_text(domain.name, domain.guessing)) else []
        for sub in domain.subdomains:
            lines.append(f"  {sub.name}: {sub.verdict}")
            if sub.units:
                lines += unit_lines(sub.name, sub.units)
    return [*lines, *filter(None, [average_gain(result)])]


def model_card(result: BuildResult) -> str:
    """The artefact's README.md in the Hub's format."""
    base, recipe = result.base.name, result.recipe
    sources = [str(source) for domain in recipe["domains"].values() for source in domain]
    measured = []
    for domain in result.domains:
        metric = domain.metric.split()[0]
        metric = "accuracy" if metric == "acc" else metric
        for name in ("expert", "routed"):
            if row := domain.rows.get(name):
                measured.append(CardMetric(domain.name, metric, row.score, f"{domain.metric}, {name}"))
    lines = [
        *_card_head(base, result.base.fingerprint, result.base.origin, measured, sources),
        "Chosen on reference documents, reported on held-out ones. Score, then the paired difference to the base with its "
        "95 % interval. *control*: random weights off, per matrix as many and as large; its interval counts the draws. *oracle*: the "
        "best candidate selected on the reported documents themselves, as the papers' tables do; it is not a result, and has no "
        "interval.",
        "",
        f"| {' | '.join(('domain', 'metric', *ROWS))} |",
        "|---|---|" + "---|" * len(ROWS),
        *map(_table_row, result.domains),
    ]
    for domain in result.domains:
        if said := guessing_text(domain.name, domain.guessing):
            lines += ["", neutral.escape_markdown(said)]
    lines += ["", "What was accepted, and what was not:", ""]
    lines += [f"- {neutral.escape_markdown(line)}" for line in headlines(result) if line.startswith("  ")]
    lines += [
        "",
        *loading_example(base, "moe", 'text, expert = moe.generate_text("...", expert="auto")'),
        *card_notes(base, result),
        f"Made with freemoe {result.freemoe} from `recipe.yaml` (seed {recipe['seed']}); every per-document score "
        "stands in `result.json`.",
        "",
        record_text(result.seen),
        "",
    ]
    return "\n".join(lines)


def _table_row(domain: DomainResult) -> str:
    """A domain's line in the table of the card."""
    cells = [neutral.escape_markdown(domain.name), neutral.escape_markdown(domain.metric)]
    for name in ROWS:
        row = domain.rows.get(name)
        gain = "" if row is None or name == "base" else f" ({gain_text(row, domain.unit)})"
        cells.append("-" if row is None else f"{row.score:.2f}{gain}")
    return f"| {' | '.join(cells)} |"


def unmeasured_card(base: str, fingerprint: str, experts: Sequence[str]) -> str:
    """The README.md of experts that no build made."""
    return "\n".join(
        [
            *_card_head(base, fingerprint),
            "These experts were put together by `save_pretrained`, not by a build: what they gain was not measured, and which documents "
            "they were made from is not recorded. Score them on documents that they have not seen: `freemoe eval`.",
            "",
            *(f"- {neutral.code_span(name)}" for name in experts),
            "",
            *loading_example(base, "moe", f'text, expert = moe.generate_text("...", expert={experts[0]!r})'),
            *card_notes(base),
            f"Made with freemoe {__version__}.",
            "",
        ]
    )


def _card_head(
    base: str,
    fingerprint: str,
    origin: str | None = None,
    measured: Sequence[CardMetric] = (),
    sources: Sequence[str] = (),
) -> list[str]:
    """Front matter, title, and what an artefact of domain experts is."""
    made = (
        f", {neutral.escape_markdown(origin)}: a little worse than the model that the file was made of"
        if origin
        else ""
    )
    about = (
        "Each expert switches off some weights of the frozen base; no weight was changed. The artefact fits that base only "
        f"(fingerprint `{fingerprint[:16]}`){made}."
    )
    tags = ["domain-experts", "frozen-base"]
    return card_header(base, f"Domain experts for {base_shown(base)}", "adapter", tags, about, measured, sources)


_PLURALS = {"neuron": "neurons", "kv_group": "KV groups", "layer": "layers", "expert": "experts"}


def unit_lines(name: str, units: dict[str, Any]) -> list[str]:
    """What stands in the summary of a build, in words."""
    lines = []
    for point in units["points"]:
        rivals = ", ".join(f"{n} {_format_figure(row)}" for n, row in point["rivals"].items())
        mark = " (the candidate)" if point["candidate"] and len(units["points"]) > 1 else ""
        lines.append(
            f"  {name}: {point['units']} of {units['of']} {_PLURALS[units['kind']]} off ({format_percent(point['share'])}){mark}: held out "
            f"{_format_figure(point['row'], interval=True)}" + (f"; at as many: {rivals}" if rivals else "")
        )
    lines += [f"  {name}: {_harmless_line(units)}"] if "margin" in units else []
    cut = units.get("cut") or {}
    if "parameters" in cut:
        lines.append(
            f"  {name}: cut out: {cut['parameters'][1] / cut['parameters'][0]:.1%} of the parameters, prefill x "
            f"{cut['prefill'][1] / cut['prefill'][0]:.2f}, decode x {cut['decode'][1] / cut['decode'][0]:.2f} tokens/s on this "
            "machine"
        )
    elif cut:
        lines.append(f"  {name}: not cut out: {cut['cannot']}")
    return lines


def _harmless_line(units: dict[str, Any]) -> str:
    row = units["points"][0]["row"]
    said = f"a loss below {units['margin']:g} {'nats per token' if 'ratio' in row else 'points'}"
    tested = f"{units['guard_documents']} selection documents (95 % interval)"
    if not units["largest_share"]:
        return f"no share tried is shown to have {said} on {tested}; more documents show more"
    held_out = next(p["row"] for p in units["points"] if p["share"] == units["largest_share"])
    share = format_percent(units["largest_share"])
    return f"largest share off shown to have {said} on {tested}: {share}; held out {_format_figure(held_out, interval=True)}"


def _format_figure(row: dict[str, Any], interval: bool = False) -> str:
    seen = row["ratio"] if "ratio" in row else row["gain"]
    text = f"x {format_decimals(seen['mean'], 3)}" if "ratio" in row else f"{seen['mean']:+.1f}"
    if not interval:
        return text
    unit = "perplexity" if "ratio" in row else "points"
    ends = "" if seen["low"] is None else f" [{seen['low']:.3g}, {seen['high']:.3g}]"
    return f"{unit} {text}{ends}"
