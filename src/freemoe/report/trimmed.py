"""The page of a trimmed mixture: what it keeps, its plan among others, training, layers. Reads result JSON only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from freemoe.evals.held_out import record_text
from freemoe.hookmoe.card import HEADER, headlines, table
from freemoe.report.figures.drawing import PALETTE, heading, new_figure, styled
from freemoe.report.figures.plan_figures import pareto_figure
from freemoe.report.page import plain_page, write_page


def write_trimmed_report(folder: str | Path) -> Path:
    """Read a trimmed mixture's ``result.json`` and write ``report.html`` beside it."""
    return write_page(folder, page)


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    return plain_page(
        f"{result['base']['name']}, trimmed",
        ["on test text", *HEADER[1:]],
        table(result),
        [*headlines(result), record_text(result.get("seen"))],
        (
            (
                "Plans that were measured on held-out text, and what each layer loses when it alone is cut.",
                pareto_figure(result["plan"]),
            ),
            ("Loss on held-out text while training; the lowest state is the one that is kept.", curves(result)),
            (
                "Layers on the test text: experts that ran, how many of them the full model ran too, load.",
                layers(result),
            ),
        ),
        result["recipe"],
    )


@styled
def curves(result: dict[str, Any]) -> Figure | None:
    """Held-out losses of hooks and control over the steps; None where nothing was trained."""
    losses = {name: values for name, values in result["hooks"]["losses"].items() if len(values) > 1}
    if not losses:
        return None
    training = result["recipe"]["training"]
    units = {
        "hooks": "cross-entropy" if training["loss"] == "lm" else "KL to the full model",
        "control": "cross-entropy",
    }
    figure = new_figure(7.0, 2.6)
    for n, (name, values) in enumerate(losses.items()):
        axes = figure.add_subplot(1, len(losses), n + 1)
        steps = [min(i * training["every"], training["steps"]) for i in range(len(values))]
        axes.plot(steps, values, marker="o", color=PALETTE[n])
        axes.set(xlabel="step", ylabel=f"{units[name]}, nats")
        heading(axes, name, "", 30)
    return figure


@styled
def layers(result: dict[str, Any]) -> Figure:
    """Act, agreement with the full model's routes, and load of every mixture layer, per row of the table."""
    rows = {n: r for n, r in result["test"]["rows"].items() if n in ("full", "plan", "hooks", "rescaled")}
    figure = new_figure(9.0, 2.6)
    parts = (
        ("act", "experts per token"),
        ("route_agreement", "routes shared with the full model"),
        ("load_cv", "load, c.v."),
    )
    for axes, (key, label) in zip(figure.subplots(1, 3), parts, strict=True):
        for n, (name, row) in enumerate(rows.items()):
            axes.plot(
                [int(i) for i in row[key]], list(row[key].values()), marker="osd^"[n], color=PALETTE[n], label=name
            )
        axes.set(xlabel="layer", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].legend()
    return figure
