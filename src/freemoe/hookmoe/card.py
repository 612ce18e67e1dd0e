"""The model card of a trimmed mixture, and its table as lines."""

from __future__ import annotations

import math
from typing import Any

from freemoe.core import neutral
from freemoe.evals.guessing import guessing_text
from freemoe.evals.held_out import record_text
from freemoe.hub.cards import Measured, base_shown, card_notes, front_matter, loading

ABOUT = {
    "full": "all experts of the base",
    "plan": "fewer experts, nothing else",
    "scale and bias": "free: one number and one vector per layer",
    "hooks": "this artefact",
    "rescaled": "free: the artefact's rule for router weights, without hooks",
    "control": "the same hooks at full k, trained on the text: gains are tuning, not compensation",
}


def share_text(values: list[float | None] | None) -> str:
    """``44 % [40, 48]``; a dash where nothing was lost, ``?`` for an end without bound."""
    if values is None or values[0] is None:
        return "-"
    low, high = ("?" if v is None else f"{100 * v:.0f}" for v in values[1:])
    return f"{100 * values[0]:.0f} % [{low}, {high}]"


def headlines(result: dict[str, Any]) -> list[str]:
    """What a trim found, in two or three lines."""
    rows, cost = result["test"]["rows"], result["cost_of_a_token"]
    full, plan = rows["full"], rows["plan"]
    lines = [
        f"plan {result['plan']['text']}: Act {result['base']['act']:.3f} -> {result['plan']['act']:.3f}, active parameters "
        f"{cost['full']['active']:,} -> {cost['trimmed']['active']:,} (hooks {cost['trimmed']['hooks']:,})",
        f"test loss {full['ce']:.4f} -> {plan['ce']:.4f} with the plan alone (KL {plan['kl']:.4f})",
    ]
    if "hooks" in rows:
        hooks = rows["hooks"]
        lines.append(
            f"with hooks (router weights: {result['rescale']['rule']}) {hooks['ce']:.4f} (KL {hooks['kl']:.4f}): "
            f"{share_text(hooks['recovered_ce'])} of the lost loss and {share_text(hooks['recovered_kl'])} of the KL won back"
        )
    if said := guessing_text("the test text", result.get("guessing")):
        lines.append(said)
    for speed in result["speed"].get("lengths") or [result["speed"]]:
        ttft, itl = ([1000 * speed[side][what] for side in ("full", "trimmed")] for what in ("ttft", "itl"))
        lines.append(
            f"first token after {ttft[0]:.1f} -> {ttft[1]:.1f} ms, further ones every {itl[0]:.1f} -> {itl[1]:.1f} ms (batch 1, "
            f"prompt of {speed['prompt']} tokens, as this machine was loaded)"
        )
    return lines


def table(result: dict[str, Any]) -> list[list[str]]:
    """Rows of the test table: name, loss, KL, shares won back, what the row is."""
    return [
        [
            name,
            f"{row['ce']:.4f}",
            f"{row['kl']:.4f}",
            share_text(row.get("recovered_ce")),
            share_text(row.get("recovered_kl")),
            ABOUT.get(name, ""),
        ]
        for name, row in result["test"]["rows"].items()
    ]


HEADER = ["", "loss", "KL", "loss won back", "KL won back", ""]


def model_card(result: dict[str, Any]) -> str:
    """README.md of the artefact."""
    lines = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    lines += [f"| {' | '.join(map(neutral.markdown, row))} |" for row in table(result)]
    title = f"{base_shown(result)}, trimmed"
    tags = ["mixture-of-experts", "frozen-base", "hooks"]
    return "\n".join(
        [
            *front_matter(result, title, "adapter", tags, _measured(result), [str(result["recipe"].get("text"))]),
            f"# {neutral.markdown(title)}",
            "",
            "A plan of experts per layer and hooks that compensate for it (HookMoE), for one base only: the fingerprint in",
            "`freemoe_config.json` is checked when it is loaded. The base's weights are not part of it.",
            "",
            *[f"- {neutral.markdown(line)}" for line in headlines(result)],
            "",
            f"On {result['test']['tokens']:,} tokens of the text's test part, which decided nothing; 95 % intervals over its blocks:",
            "",
            *lines,
            "",
            "## Use",
            "",
            *loading(result, "trimmed", 'text, way = trimmed.generate_text("...")'),
            *card_notes(result),
            "`plan.json` holds the plan alone; `exports/`, where there is one, the overrides of engines that know one k for all",
            "layers. None of them runs hooks. `recipe.yaml` repeats the run with `freemoe run`.",
            "",
            *([record_text(result["seen"]), ""] if "seen" in result else []),
        ]
    )


def _measured(result: dict[str, Any]) -> list[Measured]:
    """What the artefact, as it is run, reached on the text's test part."""
    rows = result["test"]["rows"]
    row = next(rows[name] for name in ("hooks", "rescaled", "plan") if name in rows)
    return [Measured("held-out text", "perplexity", math.exp(row["ce"]), "perplexity")]
