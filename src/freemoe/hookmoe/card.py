"""What page, card and terminal say of a trimmed mixture: verdict, table and lines; all read the result, nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from freemoe.core import neutral
from freemoe.core.numbers import format_percent
from freemoe.evals.guessing import guessing_text
from freemoe.evals.held_out import record_text
from freemoe.evals.speed import speed_lines
from freemoe.evals.verdict import GainVerdict, groups_text, interval_sign, judge_against_model
from freemoe.hookmoe.result import TrimResult
from freemoe.hub.cards import CardMetric, base_shown, card_header, card_notes, loading_example, markdown_table

ABOUT = {
    "full": "all experts of the base",
    "plan": "fewer experts, nothing else",
    "scale and bias": "free: one number and one vector per layer",
    "hooks": "this artefact",
    "rescaled": "free: the artefact's rule for router weights, without hooks",
    "control": "the same hooks at full k, trained on the text: gains are tuning, not compensation",
}


SIMPLE = {"rescaled": "rescaling", "scale and bias": "scale and bias", "control": "the control at full k"}
"""Rows that hooks must beat to be worth their weights, and what the verdict calls them."""


def share_text(values: list[float | None] | None) -> str:
    """``44 % [40, 48]``; a dash where nothing was lost, ``?`` for an end without bound."""
    if values is None or values[0] is None:
        return "-"
    low, high = ("?" if v is None else f"{100 * v:.0f}" for v in values[1:])
    return f"{100 * values[0]:.0f} % [{low}, {high}]"


def run_as(result: TrimResult) -> str:
    """The row of the test table that is the artefact as it is run."""
    return next(name for name in ("hooks", "rescaled", "plan") if name in result.test.rows)


def trim_verdict(result: TrimResult) -> GainVerdict:
    """What the artefact costs and gives against the full model, and what it wins back of what its plan alone loses."""
    rows, cost, ours = result.test.rows, result.cost_of_a_token, run_as(result)
    share = rows[ours].get("recovered_ce")
    if ours == "plan":
        then = "It is the plan alone, with nothing that compensates."
    elif share is None or share[0] is None:
        then = "The plan alone loses nothing that could be won back."
    else:
        state = interval_sign(dict(zip(("mean", "low", "high"), share, strict=True)), 0.0)
        said = {1: "reliably better", 0: "not reliably different", -1: "reliably worse"}[state]
        then = f"Against the plan alone it is {said}: {share_text(share)} of the lost loss is won back{_beyond_text(rows[ours])}."
    unknown = {"mean": math.exp(rows[ours]["ce"] - rows["full"]["ce"]), "low": None, "high": None}
    read = f"{format_percent(cost['trimmed']['active'] / cost['full']['active'])} of the weights"
    return judge_against_model(rows[ours].get("ratio", unknown), read, result.speed and result.speed.model_dump(), then)


def _beyond_text(row: dict[str, Any]) -> str:
    """What hooks win back beyond the best of `SIMPLE`, for the end of a sentence; nothing where none was measured with them."""
    beyond = {name: share for name, share in row.get("beyond", {}).items() if share[0] is not None}
    if not beyond:
        return ""
    name, share = min(beyond.items(), key=lambda entry: entry[1][0])
    than = f"than by the best of the simple corrections and the control, {SIMPLE[name]}"
    state = interval_sign(dict(zip(("mean", "low", "high"), share, strict=True)), 0.0)
    if state == 0:
        return f", not reliably more {than}: {share_text(share)}"
    mean, *ends = share if state > 0 else [-share[0], *(None if end is None else -end for end in share[:0:-1])]
    return f", {share_text([mean, *ends])} {'more' if state > 0 else 'less'} {than}"


def headlines(result: TrimResult) -> list[str]:
    """The verdict, and what a trim found, in a few lines."""
    rows, cost = result.test.rows, result.cost_of_a_token
    full, plan = rows["full"], rows["plan"]
    lines = [
        trim_verdict(result).words,
        f"plan {result.plan['text']}: Act {result.base.act:.3f} -> {result.plan['act']:.3f}, active parameters "
        f"{cost['full']['active']:,} -> {cost['trimmed']['active']:,} (hooks {cost['trimmed']['hooks']:,})",
        f"test loss {full['ce']:.4f} -> {plan['ce']:.4f} with the plan alone (KL {plan['kl']:.4f})",
    ]
    if "hooks" in rows:
        hooks = rows["hooks"]
        lines.append(
            f"with hooks (router weights: {result.rescale['rule']}) {hooks['ce']:.4f} (KL {hooks['kl']:.4f}): "
            f"{share_text(hooks['recovered_ce'])} of the lost loss and {share_text(hooks['recovered_kl'])} of the KL won back"
        )
    guess = guessing_text("the test text", result.guessing)
    return [*lines, *([guess] if guess else []), *speed_lines(result.speed and result.speed.model_dump())]


def trim_table(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Rows of a test part for people: header, and rows of name, loss, KL, shares won back, what the row is."""
    return ["", "loss", "KL", "loss won back", "KL won back", ""], [
        [
            name,
            f"{row['ce']:.4f}",
            f"{row['kl']:.4f}",
            share_text(row.get("recovered_ce")),
            share_text(row.get("recovered_kl")),
            ABOUT.get(name, ""),
        ]
        for name, row in rows.items()
    ]


def model_card(result: TrimResult) -> str:
    """Text of the artefact's README.md, with the hub's metadata."""
    base = result.base.name
    about = (
        "A plan of experts per layer and hooks that compensate for it (HookMoE), for one base only: the fingerprint in\n"
        "`freemoe_config.json` is checked when it is loaded. The base's weights are not part of it."
    )
    # What the artefact, as it is run, reached on the text's test part.
    loss = result.test.rows[run_as(result)]["ce"]
    measured = [CardMetric("held-out text", "perplexity", math.exp(loss), "perplexity")]
    tags, sources = ["mixture-of-experts", "frozen-base", "hooks"], [str(result.recipe.get("text"))]
    return "\n".join(
        [
            *card_header(base, f"{base_shown(base)}, trimmed", "adapter", tags, about, measured, sources),
            *[f"- {neutral.escape_markdown(line)}" for line in headlines(result)],
            "",
            f"On {result.test.tokens:,} tokens of the text's test part, which decided nothing; 95 % intervals "
            f"{groups_text(result.test.groups)}:",
            "",
            *markdown_table(*trim_table(result.test.rows)),
            "",
            "## Use",
            "",
            *loading_example(base, "trimmed", 'text, way = trimmed.generate_text("...")'),
            *card_notes(base, result),
            "`plan.json` holds the plan alone; `exports/`, where there is one, the overrides of engines that know one k for all",
            "layers. None of them runs hooks. `recipe.yaml` repeats the run with `freemoe run`.",
            "",
            record_text(result.seen),
            "",
        ]
    )
