"""Picture of structured purification: held-out figure against the share of the units that is off, with the rivals."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from freemoe.report.figures.drawing import INK, SOFT, heading, legend_above, panels, ratio_ticks, styled

_COLOURS = {
    "units": "#0072B2",
    "wanda": "#D55E00",
    "taylor": "#009E73",
    "activation": "#CC79A7",
    "random": "#E69F00",
}
_MARKERS = {"units": "o", "wanda": "s", "taylor": "v", "activation": "D", "random": "^"}
_LABELS = {
    "units": "learned units, 95 % interval",
    "wanda": "least |W| * ||X||",
    "taylor": "first-order Taylor",
    "activation": "least activation norm",
    "random": "random units",
}

_NARROWEST = 8.0


@styled
def unit_curve(result: dict[str, Any]) -> Figure | None:
    """One panel per subdomain: the figure against the base's over the share off; the rivals at the same shares."""
    shown = [(d, s, s["units"]) for d in result["domains"] for s in d["subdomains"] if s.get("units")]
    if not shown:
        return None
    figure, axes = panels(len(shown), columns=3, height=2.8)
    # The legend needs room, even over one panel.
    figure.set_figwidth(max(figure.get_figwidth(), _NARROWEST))
    names = dict.fromkeys(["units", *(n for _, _, u in shown for p in u["points"] for n in p["rivals"])])
    for place, (domain, subdomain, units) in zip(axes, shown, strict=True):
        text = domain["unit"] == "perplexity"
        home = 1.0 if text else 0.0
        place.axhline(home, color=INK, ls="--", lw=1)
        for name in names:
            rows = [
                (100 * p["share"], row["ratio" if text else "gain"])
                for p in units["points"]
                if (row := p["row"] if name == "units" else p["rivals"].get(name)) is not None
            ]
            rows = [(x, seen) for x, seen in rows if math.isfinite(seen["mean"])]
            xs, means = [0.0, *(x for x, _ in rows)], [home, *(seen["mean"] for _, seen in rows)]
            place.plot(xs, means, color=_COLOURS[name], marker=_MARKERS[name], markersize=4, lw=1.4)
            if name == "units":
                low, high = ([home, *(seen[end] for _, seen in rows)] for end in ("low", "high"))
                place.fill_between(xs, low, high, color=_COLOURS[name], alpha=0.18, lw=0)
        if text:
            place.set_yscale("log")
            ratio_ticks(place.yaxis, *place.get_ylim())
        best = units["largest_share"]
        heading(place, subdomain["name"], f"no proven loss up to {best:.1%} off" if best else "a loss at every share")
        place.grid()
    legend_above(
        figure,
        [Line2D([], [], color=_COLOURS[n], marker=_MARKERS[n], markersize=5, lw=1.4, label=_LABELS[n]) for n in names]
        + [Line2D([], [], color=INK, ls="--", lw=1, label="base")],
    )
    figure.supxlabel("units off, per cent", fontsize=8.5, color=SOFT)
    kinds = {d["unit"] == "perplexity" for d, _, _ in shown}
    words = {True: "perplexity / the base's", False: "gain over the base, points"}
    figure.supylabel("; ".join(words[k] for k in sorted(kinds, reverse=True)), fontsize=8.5, color=SOFT)
    return figure
