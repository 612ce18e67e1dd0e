"""The model card and the table that stand beside an artefact; both read the result, nothing else."""

from __future__ import annotations

from typing import Any

from freemoe.domain_experts.structured.wording import unit_lines
from freemoe.evals.held_out import record_text

ROWS = ("base", "expert", "routed", "control", "oracle")


def gain_text(row: dict[str, Any], unit: str) -> str:
    """A row's paired difference to the base with its interval, in words."""
    if unit == "perplexity":
        r = row["ratio"]
        return f"x {r['mean']:.3f} [{r['low']:.3f}, {r['high']:.3f}]"
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
                f"(x {rows['expert']['ratio']['mean']:.3f}, {share:.2g} % of weights off)"
            )
        else:
            lines.append(
                f"{domain['name']}: {domain['metric']} {rows['base']['score']:.1f} -> {rows['expert']['score']:.1f} "
                f"({gain_text(rows['expert'], 'points')} points, {domain['reported_documents']} held-out documents)"
            )
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


def model_card(result: dict[str, Any]) -> str:
    """The artefact's README.md in the Hub's format."""
    base = result["base"]
    lines = [
        "---",
        "library_name: freemoe",
        f"base_model: {base['name']}",
        "base_model_relation: adapter",
        "tags: [domain-experts, frozen-base]",
        "---",
        "",
        f"# Domain experts for {base['name']}",
        "",
        "Each expert switches off some weights of the frozen base; no weight was changed. The artefact fits that base only "
        f"(fingerprint `{base['fingerprint'][:16]}`)"
        + (
            f", {base['origin']}: a little worse than the model that the file was made of."
            if base.get("origin")
            else "."
        ),
        "",
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
        lines.append(f"| {domain['name']} | {domain['metric']} | " + " | ".join(cells) + " |")
    lines += ["", "What was accepted, and what was not:", ""]
    lines += [f"- {line.strip()}" for line in headlines(result) if line.startswith("  ")]
    lines += [
        "",
        "```python",
        "from freemoe import FreeMoE",
        "",
        f'moe = FreeMoE.from_pretrained("{base["name"]}", "path/to/this/folder")',
        'text, expert = moe.generate_text("...", expert="auto")',
        "```",
        "",
        f"Made with freemoe {result['freemoe']} from `recipe.yaml` (seed {result['recipe']['seed']}); every per-document score "
        "stands in `result.json`.",
        "",
        *([record_text(result["seen"]), ""] if "seen" in result else []),
    ]
    return "\n".join(lines)
