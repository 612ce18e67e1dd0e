"""The model card and the table that stand beside an artefact; both read the result, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freemoe.core import neutral
from freemoe.core.numbers import decimals
from freemoe.core.version import __version__
from freemoe.domain_experts.structured.wording import unit_lines
from freemoe.evals.guessing import guessing_text
from freemoe.evals.held_out import record_text
from freemoe.hub.cards import Measured, base_shown, card_notes, front_matter, loading
from freemoe.results.build import KIND

ROWS = ("base", "expert", "routed", "control", "oracle")


def gain_text(row: dict[str, Any], unit: str) -> str:
    """A row's paired difference to the base with its interval, in words."""
    if unit == "perplexity":
        r = row["ratio"]
        return f"x {decimals(r['mean'], 3)} [{decimals(r['low'], 3)}, {decimals(r['high'], 3)}]"
    g = row["gain"]
    return f"{g['mean']:+.1f} [{g['low']:+.1f}, {g['high']:+.1f}]"


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
                f"(x {decimals(rows['expert']['ratio']['mean'], 3)}, {share:.2g} % of weights off)"
            )
        else:
            lines.append(
                f"{domain['name']}: {domain['metric']} {rows['base']['score']:.1f} -> {rows['expert']['score']:.1f} "
                f"({gain_text(rows['expert'], 'points')} points, {domain['reported_documents']} held-out documents)"
            )
        lines += _guessing_lines(domain)
        for sub in domain["subdomains"]:
            lines.append(f"  {sub['name']}: {sub['verdict']}")
            if sub.get("units"):
                lines += unit_lines(sub["name"], sub["units"])
    mean = result.get("overall", {}).get("expert")
    if mean and len(result["overall"]["domains"]) > 1:
        lines.append(
            f"average gain over {len(result['overall']['domains'])} domains: {mean['mean']:+.2f} "
            f"[{mean['low']:+.2f}, {mean['high']:+.2f}] points"
        )
    return lines


def _guessing_lines(domain: dict[str, Any]) -> list[str]:
    said = guessing_text(domain["name"], domain.get("guessing"))
    return [said] if said else []


def model_card(result: dict[str, Any]) -> str:
    """The artefact's README.md in the Hub's format."""
    sources = [str(source) for domain in result["recipe"]["domains"].values() for source in domain]
    lines = [
        *_head(result, _measured(result), sources),
        "Chosen on reference documents, reported on held-out ones. Score, then the paired difference to the base with its "
        "95 % interval. *control*: random weights off, as many per matrix. *oracle*: the best candidate selected on the "
        "reported documents themselves, as the papers' tables do; it is not a result.",
        "",
        "| domain | metric | " + " | ".join(ROWS) + " |",
        "|---|---|" + "---|" * len(ROWS),
    ]
    for domain in result["domains"]:
        cells = []
        for name in ROWS:
            row = domain["rows"].get(name)
            cell = "-" if row is None else f"{row['score']:.2f}"
            cells.append(cell if row is None or name == "base" else f"{cell} ({gain_text(row, domain['unit'])})")
        lines.append(
            f"| {neutral.markdown(domain['name'])} | {neutral.markdown(domain['metric'])} | " + " | ".join(cells) + " |"
        )
    for domain in result["domains"]:
        lines += [line for said in _guessing_lines(domain) for line in ("", neutral.markdown(said))]
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
    return [
        *front_matter(result, title, "adapter", ["domain-experts", "frozen-base"], measured, sources),
        f"# {neutral.markdown(title)}",
        "",
        "Each expert switches off some weights of the frozen base; no weight was changed. The artefact fits that base only "
        f"(fingerprint `{base['fingerprint'][:16]}`)"
        + (
            f", {neutral.markdown(base['origin'])}: a little worse than the model that the file was made of."
            if base.get("origin")
            else "."
        ),
        "",
    ]


def _measured(result: dict[str, Any]) -> list[Measured]:
    """What experts and router reached on reported documents."""
    found = []
    for domain in result["domains"]:
        metric = "perplexity" if domain["unit"] == "perplexity" else domain["metric"].split()[0]
        metric = {"acc": "accuracy"}.get(metric, metric)
        for name in ("expert", "routed"):
            if row := domain["rows"].get(name):
                found.append(Measured(domain["name"], metric, row["score"], f"{domain['metric']}, {name}"))
    return found
