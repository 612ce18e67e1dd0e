"""Structured purification in words; reads the result, nothing else."""

from __future__ import annotations

from typing import Any

from freemoe.core.numbers import format_decimals, format_percent


def unit_lines(name: str, units: dict[str, Any]) -> list[str]:
    """What stands in the summary of a build, in words."""
    lines = []
    for point in units["points"]:
        rivals = ", ".join(f"{n} {_format_figure(row)}" for n, row in point["rivals"].items())
        mark = " (the candidate)" if point["candidate"] and len(units["points"]) > 1 else ""
        lines.append(
            f"  {name}: {point['units']} of {units['of']} {_kind_plural(units['kind'])} off ({format_percent(point['share'])}){mark}: held out "
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


def _kind_plural(kind: str) -> str:
    return {"neuron": "neurons", "kv_group": "KV groups", "layer": "layers", "expert": "experts"}[kind]


def _format_figure(row: dict[str, Any], interval: bool = False) -> str:
    seen = row["ratio"] if "ratio" in row else row["gain"]
    text = f"x {format_decimals(seen['mean'], 3)}" if "ratio" in row else f"{seen['mean']:+.1f}"
    if not interval:
        return text
    unit = "perplexity" if "ratio" in row else "points"
    ends = "" if seen["low"] is None else f" [{seen['low']:.3g}, {seen['high']:.3g}]"
    return f"{unit} {text}{ends}"
