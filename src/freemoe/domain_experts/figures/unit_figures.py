"""Picture of structured purification: held-out figure against the share of the units that is off, with the rivals."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from freemoe.domain_experts.result import BuildResult
from freemoe.report.figures.drawing import (
    WIDE,
    is_narrow,
    legend_above,
    make_panels,
    ratio_ticks,
    report_figure,
    set_bottom_label,
    set_panel_title,
)
from freemoe.report.palette import CONTROL, EXPERT, INK, RIVAL, SOFT

_COLOURS = {"units": EXPERT, "random": CONTROL}
_MARKERS = {"units": "o", "wanda": "s", "taylor": "v", "activation": "D", "random": "^"}
_DASHES = {"wanda": "-", "taylor": "--", "activation": ":"}
_LABELS = {
    "units": "learned units, 95 % interval",
    "wanda": "least |W| * ||X||",
    "taylor": "first-order Taylor",
    "activation": "least activation norm",
    "random": "random units",
}

_NARROWEST = 8.0


@report_figure(
    "units",
    "How much can go: units off against the held-out figure",
    "Whole units switched off, as many at each share for every ranking. The dashed line is the base; below it perplexity "
    "is better (above it, points). Measured on the reported split; the candidate was chosen by the stopping loss.",
)
def unit_curve(result: BuildResult, width: float = WIDE) -> Figure | None:
    """One panel per subdomain: the figure against the base's over the share off; the rivals at the same shares."""
    shown = [(d, s, s.units) for d in result.domains for s in d.subdomains if s.units]
    if not shown:
        return None
    figure, axes = make_panels(len(shown), columns=3, width=width, height=2.8)
    if not is_narrow(width):
        # The legend needs room, even over one panel.
        figure.set_figwidth(max(figure.get_figwidth(), _NARROWEST))
    names = dict.fromkeys(["units", *(n for _, _, u in shown for p in u["points"] for n in p["rivals"])])
    looks: dict[str, dict[str, Any]] = {
        n: {"color": _COLOURS.get(n, RIVAL), "ls": _DASHES.get(n, "-"), "marker": _MARKERS.get(n, "P")} for n in names
    }
    for place, (domain, subdomain, units) in zip(axes, shown, strict=True):
        text = domain.is_text
        home = 1.0 if text else 0.0
        place.axhline(home, color=INK, ls="--", lw=1)
        for name, look in looks.items():
            rows = [
                (100 * p["share"], row["ratio" if text else "gain"])
                for p in units["points"]
                if (row := p["row"] if name == "units" else p["rivals"].get(name)) is not None
            ]
            rows = [(x, seen) for x, seen in rows if math.isfinite(seen["mean"])]
            xs, means = [0.0, *(x for x, _ in rows)], [home, *(seen["mean"] for _, seen in rows)]
            place.plot(xs, means, **look, markersize=4, lw=1.4)
            if name == "units":
                low, high = ([home, *(seen[end] for _, seen in rows)] for end in ("low", "high"))
                place.fill_between(xs, low, high, color=look["color"], alpha=0.18, lw=0)
        if text:
            place.set_yscale("log")
            ratio_ticks(place.yaxis, *place.get_ylim())
        best = units["largest_share"]
        # Results from before there was a margin say what was not significant.
        title = f"loss below the margin up to {best:.1%} off" if best else "no share shown to be harmless"
        set_panel_title(place, subdomain.name, title if "margin" in units else "")
        place.grid()
    handles = [Line2D([], [], lw=1.4, markersize=5, label=_LABELS.get(n, n), **look) for n, look in looks.items()]
    legend_above(figure, [*handles, Line2D([], [], color=INK, ls="--", lw=1, label="base")])
    set_bottom_label(figure, "units off, per cent")
    kinds = {d.is_text for d, _, _ in shown}
    words = {True: "perplexity / the base's", False: "gain over the base, points"}
    figure.supylabel("; ".join(words[k] for k in sorted(kinds, reverse=True)), fontsize=8.5, color=SOFT)
    return figure
