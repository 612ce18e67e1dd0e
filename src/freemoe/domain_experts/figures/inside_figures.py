"""Pictures of the experts themselves: where the switched-off weights lie, and how signed purification went."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from freemoe.domain_experts.result import BuildResult, SubdomainResult
from freemoe.report.figures.drawing import (
    WIDE,
    draw_heatmap,
    legend_above,
    make_panels,
    panels_of,
    report_figure,
    set_bottom_label,
    set_panel_title,
)
from freemoe.report.palette import INK, PAPER, SOFT, light_colour
from freemoe.report.reading import format_percent

_CELLS_WITH_NUMBERS = 8  # layers


@report_figure(
    "where",
    "Where the switched-off weights lie",
    "Per cent of the weights of each layer and sublayer that is off. Every panel has its own scale; where the base "
    "stayed, the panel shows the best candidate that was turned down.",
)
def where_off(result: BuildResult, width: float = WIDE) -> Figure | None:
    """Share of the weights that is off, layer by sublayer, one panel per subdomain."""
    subdomains = [s for d in result.domains for s in d.subdomains]
    shown = [s for s in subdomains if any(c.off for c in s.where_off)]
    if not shown:
        return None
    shown, note = panels_of(shown, lambda sub: sub.chosen != "base")
    rows = max(len(_sublayer_names(s)) for s in shown)
    figure, axes = make_panels(len(shown), 3, width=width, height=0.95 + 0.3 * rows)
    for place, subdomain in zip(axes, shown, strict=True):
        _draw_off_shares(place, subdomain)
    set_bottom_label(figure, "layer" + (f"\n{note}" if note else ""))
    return figure


def _sublayer_names(subdomain: SubdomainResult) -> list[str]:
    return list(dict.fromkeys(c.sublayer for c in subdomain.where_off))


def _draw_off_shares(axes: Axes, subdomain: SubdomainResult) -> None:
    sublayers = _sublayer_names(subdomain)
    layers = sorted({c.layer for c in subdomain.where_off})
    shares = [[0.0] * len(layers) for _ in sublayers]
    for cell in subdomain.where_off:
        shares[sublayers.index(cell.sublayer)][layers.index(cell.layer)] = cell.off / max(1, cell.of)
    top = max(max(row) for row in shares)
    draw_heatmap(
        axes,
        shares,
        top,
        "expert",
        (lambda y, x: format_percent(shares[y][x])) if len(layers) <= _CELLS_WITH_NUMBERS else None,
    )
    stride = max(1, math.ceil(len(layers) / 12))
    axes.set_xticks([i + 0.5 for i in range(0, len(layers), stride)], [str(n) for n in layers[::stride]])
    axes.set_yticks([i + 0.5 for i in range(len(sublayers))], sublayers)
    axes.invert_yaxis()
    what = subdomain.where_off_is
    what = f"chosen: {subdomain.chosen}" if what == "chosen" else what.replace("best candidate, ", "")
    set_panel_title(axes, subdomain.name, f"{what} (darkest: {format_percent(top)} %)", most=34)


@report_figure(
    "purification",
    "Signed purification, round by round",
    "Loss on reference documents that gave no gradients; the star marks the round that was kept.",
)
def purification_curves(result: BuildResult, width: float = WIDE) -> Figure | None:
    """Loss on the stopping documents over the rounds of signed purification, one panel per subdomain."""
    shown = [
        (s, s.purification_curve)
        for d in result.domains
        for s in d.subdomains
        if len(s.purification_curve) > 1 and all(math.isfinite(v) for v in s.purification_curve)
    ]
    if not shown:
        return None
    shown, note = panels_of(shown, lambda pair: pair[0].chosen != "base")
    figure, axes = make_panels(len(shown), width=width, height=2.0)
    own = light_colour("saliency")
    for place, (subdomain, curve) in zip(axes, shown, strict=True):
        best = min(range(len(curve)), key=curve.__getitem__)
        place.axhline(curve[0], color=INK, ls="--", lw=1)
        place.plot(range(len(curve)), curve, color=own, lw=1.5)
        place.plot([best], [curve[best]], marker="*", markersize=11, color=INK, markeredgecolor=PAPER, zorder=5)
        fall = f"round {best}: {curve[0]:.3g} -> {curve[best]:.3g}" if best else "no round was better than the base"
        set_panel_title(place, subdomain.name, fall)
        place.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        place.yaxis.set_major_locator(MaxNLocator(4))
        place.margins(y=0.15)
        place.grid()
    legend_above(
        figure,
        [
            Line2D([], [], color=own, lw=1.5, label="loss on the stopping documents"),
            Line2D([], [], color=INK, ls="--", lw=1, label="base"),
            Line2D([], [], color=INK, marker="*", markersize=9, lw=0, label="round kept"),
        ],
    )
    set_bottom_label(figure, "round" + (f"\n{note}" if note else ""))
    figure.supylabel("nats per answer token", fontsize=8.5, color=SOFT)
    return figure
