"""The picture of rivals: the gain with its interval over the bytes that ship, a panel per base, material and group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.pages import panels, svg
from freemoe.report.figures.drawing import PALETTE, SOFT, drawable_name, report_style, set_panel_title

Entry = dict[str, Any]

_COLUMNS = 3
_OURS, _RIVAL = PALETTE[0], PALETTE[1]
# What ships nothing stands at the left end.
_NOTHING = 10.0
_NATS = (-20, -10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5)


def picture(details: dict[str, Any]) -> str | None:
    """An SVG, the same bytes for the same entries; None while no rival is measured."""
    entries = [e for e in details["entries"] if e.get("gain") and e["gain"][0] is not None]
    places = list(dict.fromkeys((e["base"], e["material"], e["group"]) for e in entries))
    if not places:
        return None
    with report_style():
        figure, grid = panels(len(places), _COLUMNS, 4.2, 3.3, (0.4, 0.5))
        for axes, place in zip(grid, places, strict=True):
            mine = [e for e in entries if (e["base"], e["material"], e["group"]) == place]
            _panel(axes, mine, f"{Path(place[0]).name or details['model']}, {place[1]}", place[2])
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
        return svg(figure)


def _panel(axes: Axes, entries: Sequence[Entry], title: str, group: str) -> None:
    axes.axhline(0, color=SOFT, linewidth=0.8)
    for ours, colour, marker, label in ((True, _OURS, "o", "this package"), (False, _RIVAL, "s", "rivals")):
        mine = [e for e in entries if e["ours"] == ours]
        if not mine:
            continue
        x = [max(_NOTHING, e["bytes"]) for e in mine]
        y = [e["gain"][0] for e in mine]
        ends = [[e["gain"][0] - e["gain"][1] for e in mine], [e["gain"][2] - e["gain"][0] for e in mine]]
        axes.errorbar(x, y, ends, fmt=marker, color=colour, markersize=4, linewidth=1, label=label)
    for entry in entries:
        off = f" {entry['asked_off']:.0%}" if entry["asked_off"] else ""
        where = (max(_NOTHING, entry["bytes"]), entry["gain"][0])
        axes.annotate(
            drawable_name(entry["rival"] + off), where, (4, 2), textcoords="offset points", fontsize=6, color=SOFT
        )
    values = [max(_NOTHING, e["bytes"]) for e in entries]
    # Powers of ten, as bytes, KB and MB; room for the names on the right.
    axes.set_xscale("log")
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    axes.set_xlim(10.0**low / 2, 10.0 ** (high + 0.5))
    axes.set_xticks([10.0**e for e in range(low, high + 1, max(1, (high - low) // 4))])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _bytes(v)))
    axes.xaxis.set_minor_locator(NullLocator())
    lowest, highest = (pick(e["gain"][0] for e in entries) for pick in (min, max))
    if entries[0]["kind"] == "text" and lowest < -1:
        # Losses of many nats would hide everything else.
        axes.set_yscale("symlog", linthresh=0.5)
        axes.set_yticks([t for t in _NATS if 1.3 * lowest <= t <= max(0.1, 1.3 * highest)])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("shipped (log)")
    unit = "nats per token" if entries[0]["kind"] == "text" else "points"
    set_panel_title(axes, title, f"{group}: gain, {unit}", most=40)


def _bytes(number: float) -> str:
    for unit, least in (("MB", 1e6), ("KB", 1e3)):
        if number >= least:
            return f"{number / least:g} {unit}"
    return f"{number:g} B"
