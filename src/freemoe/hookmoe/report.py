"""The page of a trimmed mixture: what it keeps, its plan among others, training, layers. Reads result JSON only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from freemoe.hookmoe.card import ABOUT, headlines, trim_table, trim_verdict
from freemoe.hookmoe.plans.plan_figures import plan_scatter, write_pareto
from freemoe.hookmoe.result import TrimResult
from freemoe.report.figures.drawing import WIDE, is_narrow, legend_above, new_figure, report_figure, set_panel_title
from freemoe.report.page import (
    PageTable,
    ReportPage,
    TableGroup,
    common_facts,
    intervals_text,
    provenance_line,
    record_line,
    render_page,
    write_page,
)
from freemoe.report.palette import light_colour, row_role
from freemoe.report.tables import plain_table
from freemoe.results import read_result

_OURS = ("hooks", "rescaled")


def tables(result: TrimResult) -> tuple[list[Any], list[str]]:
    """Tables for the terminal, and lines below them."""
    # Plans and rules per token beside each other, without hooks.
    cells = [
        (row["name"], f"{row['act']:.3f}", f"{row['loss']:.4f}", f"{row['kl']:.4f}", f"{row['accuracy']:.2f} %")
        for row in result.compared
    ]
    compared = [plain_table(("plan or rule", "Act", "loss", "KL", "next token right"), cells)] if cells else []
    return [plain_table(*trim_table(result.test.rows)), *compared], headlines(result)


def write_pages(folder: Path) -> Path:
    """Write ``plans.svg``, where plans were searched, and ``report.html`` into an artefact."""
    write_pareto(read_result(folder, TrimResult), folder)
    return write_page(folder, page)


def page(result: TrimResult) -> str:
    """The page of a result."""
    test, text, base = result.test, result.text, result.base
    header, cells = trim_table(test.rows)
    found = [(row_role(row[0], "rival"), ["" if cell == "-" else cell for cell in row[:-1]]) for row in cells]
    parts = zip(
        ("train the hooks", "choose plan, rule and state", "are reported"),
        text["passages"],
        text["blocks"],
        strict=True,
    )
    return render_page(
        ReportPage(
            title=f"{base.name}, trimmed",
            about=provenance_line(result, "fewer experts run, hooks make up for it, no weight was changed"),
            verdict=trim_verdict(result),
            findings=[("fact", line.replace("->", "→")) for line in headlines(result)[1:]],
            heading="Figures on test text",
            table=PageTable(
                f"{test.tokens:,} tokens of text that neither trained nor chose anything.",
                ("row", *header[1:-1]),
                [TableGroup(found)],
                (1, 2, 3, 4),
            ),
            reading="Loss: cross-entropy in nats per token. KL: divergence from the full model in nats per token. For both, less is "
            f"better. Won back: the share of what the plan alone loses that a row does not lose, with {intervals_text(test.groups)}",
            readings=[(name, row_role(name, "rival"), ABOUT.get(name, "a row of its own")) for name in test.rows],
            pictures=(plan_scatter, hook_training_curves, layer_routing),
            splits=[
                "The text was divided by content: "
                + ", ".join(f"{passages:,} passages ({blocks} blocks) {what}" for what, passages, blocks in parts)
                + ".",
                record_line(result.seen),
            ],
            facts=[
                ("base", base.name),
                ("base fingerprint", base.fingerprint),
                ("base layout", f"{base.family}, plan {base.plan}"),
                *common_facts(result),
            ],
        ),
        result,
    )


@report_figure(
    "training", "Training", "Loss on held-out text while training; the lowest state is the one that is kept."
)
def hook_training_curves(result: TrimResult, width: float = WIDE) -> Figure | None:
    """Held-out losses of hooks and control over the steps; None where nothing was trained."""
    losses = {name: values for name, values in result.hooks.losses.items() if len(values) > 1}
    if not losses:
        return None
    training = result.recipe["training"]
    units = {
        "hooks": "cross-entropy" if training["loss"] == "lm" else "KL to the full model",
        "control": "cross-entropy",
    }
    narrow = is_narrow(width)
    figure = new_figure(min(width, 9.0), 2.6 * len(losses) if narrow else 2.8)
    for n, (name, values) in enumerate(losses.items()):
        axes = figure.add_subplot(*((len(losses), 1) if narrow else (1, len(losses))), n + 1)
        steps = [min(i * training["every"], training["steps"]) for i in range(len(values))]
        axes.plot(steps, values, marker="o", markersize=4, color=light_colour(row_role(name)))
        axes.set(xlabel="step", ylabel=f"{units[name]}, nats")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid()
        set_panel_title(axes, name, "", 30)
    return figure


@report_figure(
    "layers",
    "Layer by layer",
    "On test text: experts that ran, how many of them the full model ran too, and how uneven the load of the experts is.",
)
def layer_routing(result: TrimResult, width: float = WIDE) -> Figure:
    """Act, agreement with the full model's routes, and load of every mixture layer, per row of the table."""
    rows = {n: r for n, r in result.test.rows.items() if n in ("full", "plan", *_OURS)}
    narrow = is_narrow(width)
    figure = new_figure(width, 6.6 if narrow else 2.9)
    parts = (
        ("act", "experts per token"),
        ("route_agreement", "routes shared with the full model"),
        ("load_cv", "load, c.v."),
    )
    looks = {
        name: {
            "color": light_colour(row_role(name, "rival")),
            "marker": "osd^"[n],
            "ls": ("-", "--", "-", ":")[n],
            "markersize": 4,
            "lw": 1.3,
        }
        for n, name in enumerate(rows)
    }
    for axes, (key, label) in zip(figure.subplots(*((3, 1) if narrow else (1, 3))), parts, strict=True):
        for name, row in rows.items():
            axes.plot([int(i) for i in row[key]], list(row[key].values()), **looks[name])
        axes.set(xlabel="layer")
        set_panel_title(axes, label, "", 36)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid()
    legend_above(figure, [Line2D([], [], label=name, **look) for name, look in looks.items()], 4)
    return figure
