"""The picture of a search for plans: every plan that was measured, the Pareto list, and the layers' own drops."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from freemoe.hookmoe.result import TrimResult
from freemoe.report.figures.drawing import (
    WIDE,
    drawable_name,
    is_narrow,
    new_figure,
    report_figure,
    report_style,
    set_panel_title,
)
from freemoe.report.palette import BASE, EXPERT, INK, RIVAL, SOFT

PLANS = "plans.svg"

COLOURS = {"knapsack": EXPERT, "tlnle": RIVAL, "full": BASE}
_OF_K = "osd^vP"
MARKERS = {"knapsack": "o", "tlnle": "^", "full": "s"}


@report_figure(
    "plans",
    "Plans that were measured",
    "Every plan on held-out text, the line through those that no other beats, and a ring around the chosen one; and, by itself, "
    "what each layer loses when it alone is cut.",
)
def plan_scatter(result: TrimResult, width: float = WIDE) -> Figure | None:
    """Act against drop of all plans, and the profile by layer; None where no profile was taken."""
    plan = result.plan
    if not plan.get("points"):
        return None
    narrow = is_narrow(width)
    figure = new_figure(min(width, 9.0), 5.8 if narrow else 3.4)
    axes, layers = figure.subplots(2, 1) if narrow else figure.subplots(1, 2, width_ratios=(3, 2))
    for source, colour in COLOURS.items():
        own = [p for p in plan["points"] if p["source"] == source]
        if own:
            axes.scatter(
                [p["act"] for p in own],
                [p["drop"] for p in own],
                s=22,
                c=colour,
                marker=MARKERS[source],
                label=source,
                zorder=3,
            )
    front = sorted(plan["pareto"], key=lambda p: p["act"])
    axes.plot([p["act"] for p in front], [p["drop"] for p in front], color=INK, linewidth=1, zorder=2)
    chosen = plan["chosen"]
    axes.scatter([chosen["act"]], [chosen["drop"]], s=120, facecolors="none", edgecolors=INK, zorder=4)
    axes.set_xlabel("Act: experts per token and layer")
    axes.set_ylabel("held-out KL, nats per token")
    axes.legend(loc="upper right")
    set_panel_title(axes, "plans", f"ring: {drawable_name(chosen['plan'], 24)}", 34)
    for number, k in enumerate(sorted({p["k"] for p in plan["profile"]})):
        own = [p for p in plan["profile"] if p["k"] == k]
        look = {
            "color": (INK, SOFT)[number % 2],
            "marker": _OF_K[number % len(_OF_K)],
            "ls": ("-", "--", ":")[number % 3],
        }
        layers.plot([p["layer"] for p in own], [p["drop"] for p in own], label=f"k = {k}", **look)
    layers.set_xlabel("layer that alone is cut")
    layers.xaxis.set_major_locator(MaxNLocator(integer=True))
    layers.set_ylim(bottom=min(0.0, *(p["drop"] for p in plan["profile"])))
    layers.legend(loc="upper right")
    set_panel_title(layers, "profile", str(plan["score"]), 24)
    return figure


def write_pareto(result: TrimResult, folder: Path) -> Path | None:
    """Write ``plans.svg`` into an artefact; None where there is no Pareto list to draw."""
    figure = plan_scatter(result)
    if figure is None:
        return None
    path = folder / PLANS
    with report_style():
        figure.savefig(path, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
    return path
