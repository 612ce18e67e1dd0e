"""The model card and the table that stand beside an artefact; both read the result, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from freemoe.core import neutral
from freemoe.core.numbers import decimals
from freemoe.core.version import __version__
from freemoe.domain_experts.structured.wording import unit_lines
from freemoe.evals.guessing import guessing_text
from freemoe.evals.held_out import record_text
from freemoe.evals.verdict import groups_text
from freemoe.hub.cards import Measured, base_shown, card_notes, front_matter, loading
from freemoe.results.build import KIND

ROWS = ("base", "expert", "routed", "control", "oracle")


def gain_text(row: dict[str, Any], unit: str) -> str:
    """A row's paired difference to the base with its interval, where it has one, in words."""
    if unit == "perplexity":
        return f"x {_with_ends(row['ratio'], lambda end: decimals(end, 3))}"
    return _with_ends(row["gain"], "{:+.1f}".format)


def _with_ends(seen: dict[str, Any], shown: Callable[[float], str]) -> str:
    ends = [seen["low"], seen["high"]]
    return shown(seen["mean"]) + (
        "" if ends == [None, None] else f" [{', '.join('-' if e is None else shown(e) for e in ends)}]"
    )


def control_text(domain: dict[str, Any]) -> str:
    """What the expert gains over random weights of the same magnitudes; nothing where there were none."""
    row = domain["rows"].get("expert", {})
    if (over := row.get("over_control")) is None:
        return ""
    text, draws = domain["unit"] == "perplexity", len(domain["rows"]["control"].get("seeds") or ())
    shown = _with_ends(over, "{:+.3f}".format if text else "{:+.1f}".format)
    verdict = (
        "one draw, so no interval" if over["low"] is None and draws == 1
        else "which weights are off matters" if over["low"] is not None and over["low"] > 0
        else "not shown that it matters which weights are off"
    )  # fmt: skip
    return f"expert minus control (random weights of the same magnitudes): {shown} {'nats per token' if text else 'points'}, {verdict}"


def average_gain(result: dict[str, Any]) -> str:
    """The average gain over the domains that are scored in points; nothing for fewer than two."""
    mean, domains = result.get("overall", {}).get("expert"), result.get("overall", {}).get("domains", ())
    if not mean or len(domains) < 2:
        return ""
    return (
        f"average gain over {len(domains)} domains (0 where the base stayed; text left out): "
        f"{_with_ends(mean, '{:+.2f}'.format)} points"
    )


def headlines(result: dict[str, Any]) -> list[str]:
    """One line per domain and subdomain: what was found, in numbers that anyone can check in the result."""
    lines = []
    for domain in result["domains"]:
        rows = domain["rows"]
        if domain["unit"] == "perplexity":
            off = sum(s["off"] for s in domain["subdomains"])
            share = 100 * off / max(1, result["base"]["weights"]) / max(1, len(domain["subdomains"]))
            lines.append(
                f"{domain['name']}: held-out perplexity {rows['base']['score']:.2f} -> {rows['expert']['score']:.2f} "
                f"({gain_text(rows['expert'], 'perplexity')} {groups_text(rows['expert'].get('clusters'))}, {share:.2g} % of weights off)"
            )
        else:
            lines.append(
                f"{domain['name']}: {domain['metric']} {rows['base']['score']:.1f} -> {rows['expert']['score']:.1f} "
                f"({gain_text(rows['expert'], 'points')} points, {domain['reported_documents']} held-out documents)"
            )
        lines += [f"  {domain['name']}: {said}"] if (said := control_text(domain)) else []
        lines += [said] if (said := guessing_text(domain["name"], domain.get("guessing"))) else []
        for sub in domain["subdomains"]:
            lines.append(f"  {sub['name']}: {sub['verdict']}")
            if sub.get("units"):
                lines += unit_lines(sub["name"], sub["units"])
    return [*lines, *filter(None, [average_gain(result)])]


def model_card(result: dict[str, Any]) -> str:
    """The artefact's README.md in the Hub's format."""
    sources = [str(source) for domain in result["recipe"]["domains"].values() for source in domain]
    lines = [
        *_head(result, _measured(result), sources),
        "Chosen on reference documents, reported on held-out ones. Score, then the paired difference to the base with its "
        "95 % interval. *control*: random weights off, per matrix as many and as large; its interval counts the draws. *oracle*: the "
        "best candidate selected on the reported documents themselves, as the papers' tables do; it is not a result, and has no "
        "interval.",
        "",
        "| domain | metric | " + " | ".join(ROWS) + " |",
        "|---|---|" + "---|" * len(ROWS),
    ]
    for domain in result["domains"]:
        cells = [neutral.markdown(domain["name"]), neutral.markdown(domain["metric"])]
        for name in ROWS:
            row = domain["rows"].get(name)
            gain = "" if row is None or name == "base" else f" ({gain_text(row, domain['unit'])})"
            cells.append("-" if row is None else f"{row['score']:.2f}{gain}")
        lines.append(f"| {' | '.join(cells)} |")
    for domain in result["domains"]:
        if said := guessing_text(domain["name"], domain.get("guessing")):
            lines += ["", neutral.markdown(said)]
    lines += ["", "What was accepted, and what was not:", ""]
    lines += [f"- {neutral.markdown(line)}" for line in headlines(result) if line.startswith("  ")]
    lines += [
        "",
        *loading(result, "moe", 'text, expert = moe.generate_text("...", expert="auto")'),
        *card_notes(result),
        f"Made with freemoe {result['freemoe']} from `recipe.yaml` (seed {result['recipe']['seed']}); every per-document score "
        "stands in `result.json`.",
        "",
        *([record_text(result["seen"]), ""] if "seen" in result else []),
    ]
    return "\n".join(lines)


def unmeasured_card(base: dict[str, Any], experts: Sequence[str]) -> str:
    """The README.md of experts that no build made.

    Args:
        base: ``name`` and ``fingerprint``.
        experts: Their names.
    """
    result = {"kind": KIND, "base": base}
    return "\n".join(
        [
            *_head(result, [], []),
            "These experts were put together by `save_pretrained`, not by a build: what they gain was not measured, and which documents "
            "they were made from is not recorded. Score them on documents that they have not seen: `freemoe eval`.",
            "",
            *(f"- {neutral.code(name)}" for name in experts),
            "",
            *loading(result, "moe", f'text, expert = moe.generate_text("...", expert={experts[0]!r})'),
            *card_notes(result),
            f"Made with freemoe {__version__}.",
            "",
        ]
    )


def _head(result: dict[str, Any], measured: Sequence[Measured], sources: Sequence[str]) -> list[str]:
    """Front matter, title, and what an artefact of domain experts is."""
    base = result["base"]
    title = f"Domain experts for {base_shown(result)}"
    made = ""
    if origin := base.get("origin"):
        made = f", {neutral.markdown(origin)}: a little worse than the model that the file was made of"
    return [
        *front_matter(result, title, "adapter", ["domain-experts", "frozen-base"], measured, sources),
        f"# {neutral.markdown(title)}",
        "",
        "Each expert switches off some weights of the frozen base; no weight was changed. The artefact fits that base only "
        f"(fingerprint `{base['fingerprint'][:16]}`){made}.",
        "",
    ]


def _measured(result: dict[str, Any]) -> list[Measured]:
    """What experts and router reached on reported documents."""
    found = []
    for domain in result["domains"]:
        metric = domain["metric"].split()[0]
        metric = "accuracy" if metric == "acc" else metric
        for name in ("expert", "routed"):
            if row := domain["rows"].get(name):
                found.append(Measured(domain["name"], metric, row["score"], f"{domain['metric']}, {name}"))
    return found
